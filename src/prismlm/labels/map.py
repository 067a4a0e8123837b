"""Where every prototype stands on a map: UMAP of the prototypes by cosine (McInnes et al. 2018)."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.spatial import KDTree

from prismlm.files import WAY_OUT, room_to_write
from prismlm.index.lens import Lens
from prismlm.labels.write import write_columns
from prismlm.layers import PrototypeHead
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

NEIGHBOURS, LEAST_DISTANCE, SEED = 15, 0.1, 0
NEAR = 10
ROWS_AT_ONCE = 512
# What the record of every map says of how it was made.
MADE = {
    "method": "umap",
    "neighbours": NEIGHBOURS,
    "least_distance": LEAST_DISTANCE,
    "seed": SEED,
}


class Nearest(NamedTuple):
    """The nearest of each prototype by cosine, itself the first.

    Attributes:
        indices: int64 [K, n].
        distances: 1 − cosine, float32 [K, n].
    """

    indices: torch.Tensor
    distances: torch.Tensor


def map_lens(lens: Lens, head: PrototypeHead, *, progress: Reporter = SILENT) -> dict[str, Any]:
    """Lay the prototypes of a lens out in two dimensions; ``x`` and ``y`` of its table get them.

    Returned is what its record says: ``same_category``, the share of the ten nearest of each on the
    map that have its category, over those with a label, or None where there are no labels;
    ``by_chance``, the same where categories are dealt out anew; and how the map was made.

    The same prototypes have the same map each time: one thread, seeded.

    Args:
        lens: of the head.
        head: K prototypes.
        progress: shows how far it is.

    Raises:
        ModuleNotFoundError: umap-learn is not installed, of the extra ``map``.
    """
    prototypes = head.prototypes.detach().float()
    room = room_to_write(f"the map in {lens.path}", lens.path, WAY_OUT)
    with room, writing(lens.path):
        nearest = nearest_prototypes(prototypes, progress)
        with progress.task("Laying out prototypes", 1, "maps") as task:
            places = laid_out(prototypes, nearest)
            found = MADE | _categories_on(places, lens)
            write_columns(lens, {"x": places[:, 0], "y": places[:, 1]}, map=found)
            task.advance()
    return found


def nearest_prototypes(prototypes: torch.Tensor, progress: Reporter = SILENT) -> Nearest:
    """Return the nearest of each prototype, by brute force."""
    unit = prototypes * inverse_norms(prototypes)
    count = min(NEIGHBOURS, len(unit))
    parts: list[Nearest] = []
    with progress.task("Finding neighbours", len(unit), "prototypes") as task:
        for first in range(0, len(unit), ROWS_AT_ONCE):
            cosines = unit[first : first + ROWS_AT_ONCE] @ unit.T
            rows = torch.arange(len(cosines))
            # Rounding must not put another before it; its distance is 0.
            cosines[rows, first + rows] = 1.0
            values, indices = cosines.topk(count)
            parts.append(Nearest(indices, 1 - values))
            task.advance(len(rows))
    return Nearest(*(torch.cat(column) for column in zip(*parts, strict=True)))


def laid_out(prototypes: torch.Tensor, nearest: Nearest) -> np.ndarray:
    """Return a place for each prototype, [K, d] to float32 [K, 2]; seeded."""
    points = prototypes.numpy()
    if len(points) <= NEIGHBOURS:
        # Too few to have neighbours: the first two principal directions say as much.
        centred = points - points.mean(0)
        left, size, _ = np.linalg.svd(centred, full_matrices=False)
        flat = np.zeros((len(points), 2), np.float32)
        flat[:, : min(2, len(size))] = (left * size)[:, :2]
        return flat
    from umap import UMAP

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        # A seed means one thread, which is what a seed is given for; and no point comes later,
        # which would need more than the neighbours.
        warnings.filterwarnings("ignore", "n_jobs value|precomputed_knn", UserWarning)
        layout_of = UMAP(
            n_neighbors=NEIGHBOURS,
            min_dist=LEAST_DISTANCE,
            metric="cosine",
            random_state=SEED,
            n_jobs=1,
            precomputed_knn=(nearest.indices.numpy(), nearest.distances.numpy()),
        )
        try:
            return np.asarray(layout_of.fit_transform(points), np.float32)
        finally:
            # numba sets the number of threads of the OpenMP that PyTorch uses too.
            torch.set_num_threads(threads)


def map_record(lens: Lens) -> dict[str, Any]:
    """Return what made the map of a lens, and how many neighbours share a category by now.

    The lens's own record says so of the categories there were when the map was made, if any.
    """
    assert lens.meta.map is not None
    places = np.stack([lens.prototypes[name].to_numpy() for name in ("x", "y")], axis=1)
    return lens.meta.map | _categories_on(places, lens)


def _categories_on(places: np.ndarray, lens: Lens) -> dict[str, float | None]:
    same, chance = category_neighbours(places, lens.categories)
    return {"same_category": same, "by_chance": chance}


def category_neighbours(
    places: np.ndarray, categories: list[str | None]
) -> tuple[float | None, float | None]:
    """Return how many of the nearest on a map share a category, and how many do by chance.

    Args:
        places: [K, 2].
        categories: of each, None without a label.
    """
    known = np.array([name is not None for name in categories])
    if known.sum() <= NEAR:
        return None, None
    names = np.array([str(name) for name in categories])[known]
    nearest = np.asarray(KDTree(places[known]).query(places[known], NEAR + 1)[1])
    dealt = np.random.default_rng(SEED).permutation(names)
    same, chance = (float((of[nearest[:, 1:]] == of[:, None]).mean()) for of in (names, dealt))
    return same, chance
