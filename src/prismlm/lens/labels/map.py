"""A map of the prototypes, UMAP of their cosines (McInnes et al. 2018), with named regions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.cluster.vq import kmeans2

from prismlm.errors import InputError
from prismlm.files import WAY_OUT, room_to_write
from prismlm.layers import PrototypeHead
from prismlm.lens.labels.contexts import BOILERPLATE, MORPHOLOGY, OTHER, SCAFFOLD
from prismlm.lens.labels.write import write_columns
from prismlm.lens.lens import Lens
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

NEIGHBOURS, SEED = 15, 0
# Prototypes of a region on average, and regions at most.
REGION, REGIONS = 60, 24
# The least share and lift of the category that a region is named by, and prototypes and lift of a
# word, with its letters.
CATEGORY_SHARE, CATEGORY_LIFT = 0.3, 1.3
WORD_PROTOTYPES, WORD_LIFT, WORD_LETTERS = 5, 5.0, 4
# The prototype that a page opens at has this score, and a category other than these.
GOOD_SCORE = 0.9
UNINFORMATIVE = {None, BOILERPLATE, MORPHOLOGY, OTHER, SCAFFOLD}


def map_lens(lens: Lens, head: PrototypeHead, *, progress: Reporter = SILENT) -> dict[str, Any]:
    """Write columns ``x`` and ``y`` of a seeded map of the prototypes; return its record."""
    lens.files.check_local("map")
    record = {"method": "umap", "seed": SEED}
    room = room_to_write(f"the map in {lens.path}", lens.path, WAY_OUT)
    with room, writing(lens.path), progress.task("Laying out prototypes", 1, "maps") as task:
        points = laid_out(head.prototypes.detach().float().numpy())
        write_columns(lens, {"x": points[:, 0], "y": points[:, 1]}, map=record)
        task.advance()
    return record


def laid_out(prototypes: np.ndarray) -> np.ndarray:
    """Return a point for each of [K, d] prototypes, float32 [K, 2]."""
    from umap import UMAP

    if len(prototypes) <= NEIGHBOURS:
        raise InputError(
            f"a map needs more than {NEIGHBOURS} prototypes, and the model has {len(prototypes)}."
        )
    threads = torch.get_num_threads()
    layout = UMAP(NEIGHBOURS, metric="cosine", n_jobs=1, random_state=SEED)
    try:
        points = layout.fit_transform(prototypes)
    finally:
        # numba sets the threads of the OpenMP that PyTorch uses too.
        torch.set_num_threads(threads)
    return np.asarray(points, np.float32)


class Region(NamedTuple):
    """The center and the name of a region."""

    x: float
    y: float
    name: str


def regions(lens: Lens) -> list[Region]:
    """Return the named regions of a map, the largest first.

    Regions are clusters of k-means, seeded. A region is named by the category with the largest
    n log²(lift): n is how many of its prototypes have it, lift their share relative to the whole
    map. Regions without such a category are named by a word that their prototypes raise, ranked
    alike. A name is that of one region.
    """
    points = np.stack([lens.prototypes[name].to_numpy() for name in ("x", "y")], axis=1)
    count = min(REGIONS, len(points) // REGION)
    if count < 2:
        return []
    region_of = kmeans2(points.astype(np.float64), count, minit="++", rng=SEED)[1]
    sizes = np.bincount(region_of, minlength=count)
    categories = [{category} - {None, OTHER} for category in lens.categories]
    words = words_raised(lens.prototypes["top_tokens"].to_pylist())
    names: dict[int, str] = {}
    for kinds, least, share, lift in (
        (categories, 0, CATEGORY_SHARE, CATEGORY_LIFT),
        (words, WORD_PROTOTYPES, 0.0, min(WORD_LIFT, count / 2)),
    ):
        for region, name, n, lifted in _ranked(region_of, sizes, kinds):
            distinctive = n >= max(least, share * sizes[region]) and lifted >= lift
            if distinctive and region not in names and name not in names.values():
                names[region] = name
    centers = [np.median(points[region_of == region], axis=0) for region in range(count)]
    return [
        Region(*map(float, centers[region].round(3)), name=names[region])
        for region in np.argsort(-sizes).tolist()
        if region in names
    ]


def words_raised(tokens: list[list[str]]) -> list[set[str]]:
    """Return the words among the tokens of each prototype.

    Where some tokens begin with a space, as words do in most vocabularies, others are word pieces.
    """
    spaced = any(token[:1].isspace() for row in tokens for token in row)
    return [
        {
            word
            for token in row
            if (word := token.strip().lower()).isalpha() and len(word) >= WORD_LETTERS
            if token[:1].isspace() or not spaced
        }
        for row in tokens
    ]


def _ranked(
    region_of: np.ndarray, sizes: np.ndarray, names: Sequence[set[Any]]
) -> list[tuple[int, str, int, float]]:
    """Return region, name, n and lift of each name in a region, the most distinctive first."""
    pairs = [(int(r), name) for r, of_one in zip(region_of, names, strict=True) for name in of_one]
    total = Counter(name for _, name in pairs)
    rows = [
        (region, name, n, n * len(region_of) / (int(sizes[region]) * total[name]))
        for (region, name), n in Counter(pairs).items()
    ]
    return sorted(rows, key=lambda row: (-row[2] * math.log(max(row[3], 1.0)) ** 2, row[:2]))


def first_prototype(lens: Lens) -> int:
    """Return the prototype a page opens at: the largest with a good name and a subject."""
    scores = lens.prototypes["label_score"].to_pylist()
    for number in lens.by_size.tolist():
        if (scores[number] or 0) >= GOOD_SCORE and lens.categories[number] not in UNINFORMATIVE:
            return number
    return int(lens.by_size[0])
