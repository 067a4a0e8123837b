"""Where every prototype stands on a map: UMAP of the prototypes by cosine (McInnes et al. 2018)."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.spatial import KDTree

from prismlm.index.lens import Lens
from prismlm.labels.write import write_columns
from prismlm.layers import PrototypeHead
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

NEIGHBOURS, LEAST_DISTANCE, SEED = 15, 0.1, 0
NEAR = 10


@dataclass(frozen=True)
class PrototypeMap:
    """What a map was made with, and whether it shows what prototypes are about.

    Attributes:
        method: how prototypes were laid out.
        neighbours, least_distance, seed: of the method.
        same_category: share of the ten nearest of each on the map that have its category, over
            those with a label; None where there are no labels.
        by_chance: the same where categories are dealt out anew.
    """

    method: str
    neighbours: int
    least_distance: float
    seed: int
    same_category: float | None
    by_chance: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def map_lens(lens: Lens, head: PrototypeHead, *, progress: Reporter = SILENT) -> PrototypeMap:
    """Lay the prototypes of a lens out in two dimensions; ``x`` and ``y`` of its table get them.

    The same prototypes have the same map each time: one thread, seeded.

    Args:
        lens: of the head.
        head: K prototypes.
        progress: shows that it is under way.

    Raises:
        ModuleNotFoundError: umap-learn is not installed, of the extra ``map``.
    """
    with writing(lens.path), progress.task("Laying out prototypes", 1, "maps") as task:
        places = laid_out(head.prototypes.detach().float().numpy())
        same, chance = category_neighbours(places, lens.categories)
        found = made_map(same, chance)
        write_columns(lens, {"x": places[:, 0], "y": places[:, 1]}, map=found.to_dict())
        task.advance()
    return found


def made_map(same: float | None = None, chance: float | None = None) -> PrototypeMap:
    """Return what :func:`laid_out` makes a map with."""
    return PrototypeMap("umap", NEIGHBOURS, LEAST_DISTANCE, SEED, same, chance)


def laid_out(prototypes: np.ndarray) -> np.ndarray:
    """Return a place for each prototype, [K, d] to float32 [K, 2]; seeded."""
    if len(prototypes) <= NEIGHBOURS:
        # Too few to have neighbours: the first two principal directions say as much.
        centred = prototypes - prototypes.mean(0)
        left, size, _ = np.linalg.svd(centred, full_matrices=False)
        flat = np.zeros((len(prototypes), 2), np.float32)
        flat[:, : min(2, len(size))] = (left * size)[:, :2]
        return flat
    from umap import UMAP

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        # It says that a seed means one thread, which is what a seed is given for.
        warnings.filterwarnings("ignore", "n_jobs value", UserWarning)
        layout_of = UMAP(
            n_neighbors=NEIGHBOURS,
            min_dist=LEAST_DISTANCE,
            metric="cosine",
            random_state=SEED,
            n_jobs=1,
        )
        try:
            return np.asarray(layout_of.fit_transform(prototypes), np.float32)
        finally:
            # numba sets the number of threads of the OpenMP that PyTorch uses too.
            torch.set_num_threads(threads)


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
