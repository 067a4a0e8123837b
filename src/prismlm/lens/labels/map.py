"""Where every prototype stands on a map: UMAP of the prototypes by cosine (McInnes et al. 2018)."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.cluster.vq import kmeans2

from prismlm.files import WAY_OUT, room_to_write
from prismlm.layers import PrototypeHead
from prismlm.lens.labels.categories import BOILERPLATE, MORPHOLOGY, OTHER, SCAFFOLD
from prismlm.lens.labels.write import write_columns
from prismlm.lens.lens import Lens
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

NEIGHBOURS, LEAST_DISTANCE, SEED = 15, 0.1, 0
# Regions of a map: how many prototypes each has on average, how many regions at most, and how large
# a part of one is of the category that it is called by, or how many prototypes have its word.
REGION, REGIONS = 60, 24
CATEGORY_PART, CATEGORY_LIFT = 0.3, 1.3
WORD_PROTOTYPES, WORD_LIFT, WORD_LETTERS, WORDS_SHOWN = 5, 5.0, 4, 2
# A prototype to begin with: its name tells its places apart so well, and it is of a subject.
WELL_NAMED = 0.9
UNTELLING = {None, BOILERPLATE, MORPHOLOGY, OTHER, SCAFFOLD}
ROWS_AT_ONCE = 512
# What the record of every map says of how it was made.
MADE = {
    "method": "umap",
    "neighbours": NEIGHBOURS,
    "least_distance": LEAST_DISTANCE,
    "seed": SEED,
}


def map_lens(lens: Lens, head: PrototypeHead, *, progress: Reporter = SILENT) -> dict[str, Any]:
    """Lay the prototypes of a lens out in two dimensions; ``x`` and ``y`` of its table get them.

    Returned is how the map was made, as its record says. The same prototypes have the same map each
    time: one thread, seeded.

    Raises:
        ModuleNotFoundError: umap-learn is not installed, of the extra ``map``.
    """
    room = room_to_write(f"the map in {lens.path}", lens.path, WAY_OUT)
    with room, writing(lens.path), progress.task("Laying out prototypes", 1, "maps") as task:
        places = laid_out(head.prototypes.detach().float())
        write_columns(lens, {"x": places[:, 0], "y": places[:, 1]}, map=MADE)
        task.advance()
    return MADE


def nearest_prototypes(prototypes: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest of each prototype, itself the first, and 1 − cosine: [K, n] each."""
    unit = prototypes * inverse_norms(prototypes)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for first in range(0, len(unit), ROWS_AT_ONCE):
        cosines = unit[first : first + ROWS_AT_ONCE] @ unit.T
        # Rounding must not put another before it; its distance is 0.
        cosines.diagonal(first).fill_(1.0)
        values, indices = cosines.topk(NEIGHBOURS)
        parts.append((indices, 1 - values))
    indices, distances = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    return indices, distances


def laid_out(prototypes: torch.Tensor) -> np.ndarray:
    """Return a place for each prototype, [K, d] to float32 [K, 2]; seeded."""
    points = prototypes.numpy()
    if len(points) <= NEIGHBOURS:
        # Too few to have neighbours: the first two principal directions say as much.
        left, size, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
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
            precomputed_knn=nearest_prototypes(prototypes),
        )
        try:
            return np.asarray(layout_of.fit_transform(points), np.float32)
        finally:
            # numba sets the number of threads of the OpenMP that PyTorch uses too.
            torch.set_num_threads(threads)


class Region(NamedTuple):
    """A part of a map: its middle and what it is called."""

    x: float
    y: float
    name: str


def regions(lens: Lens) -> list[Region]:
    """Return the regions of a map, those with most prototypes first.

    They are the cells of k-means over the places, seeded. A region is called by the category for
    which n log²(lift) is largest: n counts the region's prototypes of it, lift is their part of the
    region over that of the whole map. Each category names one region at most. The other regions are
    called by words that their prototypes raise, chosen alike.
    """
    places = np.stack([lens.prototypes[name].to_numpy() for name in ("x", "y")], axis=1)
    count = min(REGIONS, len(places) // REGION)
    if count < 2:
        return []
    of = kmeans2(places.astype(np.float64), count, minit="++", rng=SEED)[1]
    sizes = np.bincount(of, minlength=count)
    kinds = [{one} - {None, OTHER} for one in lens.categories]
    words = [
        {word.strip().lower() for word in row if _is_word(word)}
        for row in lens.prototypes["top_tokens"].to_pylist()
    ]
    called: dict[int, list[str]] = {}
    for region, name, some, lift in _telling(of, sizes, kinds):
        large = some >= CATEGORY_PART * sizes[region] and lift >= CATEGORY_LIFT
        if large and region not in called and [name] not in called.values():
            called[region] = [name]
    categorised = set(called)
    for region, name, some, lift in _telling(of, sizes, words):
        own = called.setdefault(region, [])
        often = some >= WORD_PROTOTYPES and lift >= min(WORD_LIFT, count / 2)
        if often and region not in categorised and len(own) < WORDS_SHOWN:
            own.append(name)
    middles = [np.median(places[of == region], axis=0).round(3).tolist() for region in range(count)]
    return [
        Region(middles[region][0], middles[region][1], ", ".join(called[region]))
        for region in np.argsort(-sizes).tolist()
        if called.get(region)
    ]


def _is_word(token: str) -> bool:
    return token.strip().isalpha() and len(token.strip()) >= WORD_LETTERS


def _telling(
    of: np.ndarray, sizes: np.ndarray, names: Sequence[set[Any]]
) -> list[tuple[int, str, int, float]]:
    """Return region, name, n and lift of each name in a region, the most telling first."""
    seen = Counter(name for some in names for name in some)
    inside = Counter(
        (int(region), name) for region, some in zip(of, names, strict=True) for name in some
    )
    rows = [
        (region, name, n, n * len(of) / (int(sizes[region]) * seen[name]))
        for (region, name), n in inside.items()
    ]
    return sorted(rows, key=lambda row: (-row[2] * math.log(max(row[3], 1.0)) ** 2, row[:2]))


def worth_seeing(lens: Lens) -> int:
    """Return the prototype that a page opens at: well named, of a subject, with most text."""
    scores = lens.prototypes["label_score"].to_pylist()
    for number in lens.leading.tolist():
        if (scores[number] or 0) >= WELL_NAMED and lens.categories[number] not in UNTELLING:
            return number
    return int(lens.leading[0])
