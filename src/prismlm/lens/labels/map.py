"""A map of the prototypes, UMAP of their cosines (McInnes et al. 2018), with named regions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import torch
from scipy.cluster.vq import kmeans2

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.lens.labels.contexts import OTHER
from prismlm.lens.labels.write import write_columns
from prismlm.lens.lens import Lens
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

NEIGHBOURS, SEED = 15, 0
# Prototypes of a region on average, and regions at most.
REGION, REGIONS = 60, 24
# The least share and lift of the category that a region is named by.
CATEGORY_SHARE, CATEGORY_LIFT = 0.3, 1.3


def map_lens(lens: Lens, head: PrototypeHead, *, progress: Reporter = SILENT) -> dict[str, Any]:
    """Write columns ``x`` and ``y`` of a seeded map of the prototypes; return its record."""
    lens.files.check_local("map")
    record = {"method": "umap", "seed": SEED}
    with writing(lens.path), progress.task("Laying out prototypes", 1, "maps") as task:
        points = laid_out(head.prototypes.detach().float().numpy())
        write_columns(lens, {"x": points[:, 0], "y": points[:, 1]}, map=record)
        task.advance()
    return record


def laid_out(prototypes: np.ndarray) -> np.ndarray:
    """Return a point for each of [K, d] prototypes, float32 [K, 2]."""
    if len(prototypes) <= NEIGHBOURS:
        raise InputError(f"a map needs more than {NEIGHBOURS} prototypes, not {len(prototypes)}.")
    from umap import UMAP

    threads = torch.get_num_threads()
    layout = UMAP(NEIGHBOURS, metric="cosine", n_jobs=1, random_state=SEED)
    try:
        points = layout.fit_transform(prototypes)
    finally:
        # numba sets the threads of the OpenMP that PyTorch uses too.
        torch.set_num_threads(threads)
    return np.asarray(points, np.float32)


def regions(lens: Lens) -> list[tuple[float, float, str]]:
    """Return center and name of the regions of a map, the largest first; none without categories.

    Regions are clusters of k-means, seeded. A region is named by the category with the largest
    n log²(lift): n is how many of its prototypes have it, lift their share relative to the whole
    map. A category names one region.
    """
    points = np.stack([lens.prototypes[name].to_numpy() for name in ("x", "y")], axis=1)
    count = min(REGIONS, len(points) // REGION)
    if count < 2:
        return []
    region_of = kmeans2(points.astype(np.float64), count, minit="++", rng=SEED)[1]
    pairs = [
        (region, category)
        for region, category in zip(region_of.tolist(), lens.categories, strict=True)
        if category not in (None, OTHER)
    ]
    sizes, total = Counter(region_of.tolist()), Counter(category for _, category in pairs)
    ranked = [
        (n * math.log(max(lift, 1.0)) ** 2, region, category)
        for (region, category), n in Counter(pairs).items()
        if (lift := n * len(points) / (sizes[region] * total[category])) >= CATEGORY_LIFT
        if n >= CATEGORY_SHARE * sizes[region]
    ]
    names: dict[int, str] = {}
    for _, region, category in sorted(ranked, reverse=True):
        if region not in names and category not in names.values():
            names[region] = category
    centers = {r: np.median(points[region_of == r], axis=0).round(3).tolist() for r in names}
    ordered = (region for region, _ in sizes.most_common() if region in names)
    return [(*centers[r], names[r]) for r in ordered]
