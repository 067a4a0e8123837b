"""Whether channels of a short half-life keep to few tokens.

The source takes how often the most writing tokens repeat as a stand-in for locality, without saying
how it counts. Here: 1 − distinct / all, over the tokens that :func:`rank_sequences` keeps.
Source: ProtoT, A.8, Table 21.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError
from prismlm.instruments.channels.top_sequences import TopSequences

PERMUTATIONS = 9_999


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's rank correlation.

    Attributes:
        rho: −1 to 1.
        p: two-sided; from permutations never below 1 / (permutations + 1).
        p_from: ``"t"``, Student's distribution with n − 2 degrees of freedom, or
            ``"permutations"``.
        count: n.
    """

    rho: float
    p: float
    p_from: Literal["t", "permutations"]
    count: int


@dataclass(frozen=True)
class Quartiles:
    """Repetition in four groups of channels by half-life, the shortest first.

    Attributes:
        bounds: half-lives between the groups; a channel at a bound is in the shorter group.
        counts: channels in each.
        means: mean repetition of each; NaN of an empty group.
        cohens_d: (mean of the first − mean of the last) / pooled standard deviation.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    means: tuple[float, ...]
    cohens_d: float


def repetition(best: TopSequences) -> Float[Tensor, " R"]:
    """Return 1 − distinct / all over each channel's kept tokens: 0 if none comes twice; float64.

    Raises:
        InputError: a channel for which no token was kept.
    """
    scores: list[float] = []
    for row in best.token.flatten(1):
        kept = row[row >= 0]
        if not kept.numel():
            raise InputError("a channel has no kept tokens: rank sequences of a corpus first.")
        scores.append(1 - kept.unique().numel() / kept.numel())
    return torch.tensor(scores, dtype=torch.float64)


def spearman(
    x: Float[Tensor, " n"],
    y: Float[Tensor, " n"],
    *,
    permutations: int | None = None,
    seed: int = 0,
) -> RankCorrelation:
    """Return Spearman's ρ, Pearson's correlation of ranks, ties sharing their mean rank.

    Args:
        x, y: n ≥ 3 pairs.
        permutations: of y for p, or None for Student's distribution where SciPy is installed and
            9,999 permutations where it is not.
        seed: of the permutations.

    Raises:
        InputError: fewer than 3 pairs, figures that are not finite, or all alike.
    """
    first, second = _ranks("x", x), _ranks("y", y)
    if len(first) != len(second) or len(first) < 3:
        raise InputError(f"{len(first)} and {len(second)} figures: expected 3 pairs or more.")
    scale = math.sqrt((first @ first) * (second @ second))
    rho = max(-1.0, min(1.0, float(first @ second) / scale))
    if permutations is None and importlib.util.find_spec("scipy") is not None:
        stats: Any = importlib.import_module("scipy.stats")
        p = float(stats.spearmanr(x.numpy(force=True), y.numpy(force=True)).pvalue)
        return RankCorrelation(rho, p, "t", len(first))
    wanted = PERMUTATIONS if permutations is None else permutations
    if wanted < 1:
        raise InputError(f"{wanted} permutations: expected at least 1.")
    generator = np.random.default_rng(seed)
    # Rounding must not tell equal arrangements apart.
    bound = abs(rho) - 1e-12
    drawn = (abs(first @ generator.permutation(second)) / scale >= bound for _ in range(wanted))
    return RankCorrelation(rho, float(1 + sum(drawn)) / (1 + wanted), "permutations", len(first))


def quartiles(half_life: Float[Tensor, " n"], scores: Float[Tensor, " n"]) -> Quartiles:
    """Compare repetition over quartiles of half-life.

    Raises:
        InputError: fewer than two channels in the first or last quartile, or no spread in both.
    """
    if half_life.shape != scores.shape or half_life.ndim != 1:
        raise InputError(
            f"half-lives are {list(half_life.shape)} and scores {list(scores.shape)}: expected one "
            "of each for every channel."
        )
    lives, values = half_life.double().numpy(force=True), scores.double().numpy(force=True)
    if not len(lives):
        raise InputError("there are no channels to compare.")
    bounds = np.quantile(lives, [0.25, 0.5, 0.75])
    group = np.searchsorted(bounds, lives)
    parts = [values[group == i] for i in range(4)]
    first, last = parts[0], parts[3]
    if min(len(first), len(last)) < 2:
        raise InputError(
            f"{len(first)} channels in the first quartile of half-lives and {len(last)} in the "
            "last: expected two or more of each. Channels that all decay alike have no quartiles."
        )
    # Exact, where the sum of squares about a rounded mean is not.
    if np.ptp(first) == 0 and np.ptp(last) == 0:
        raise InputError("repetition is one figure in each outer quartile, so d has no unit.")
    squares = sum(((part - part.mean()) ** 2).sum() for part in (first, last))
    pooled = math.sqrt(squares / (len(first) + len(last) - 2))
    return Quartiles(
        tuple(bounds.tolist()),
        tuple(len(part) for part in parts),
        tuple(float(part.mean()) if len(part) else math.nan for part in parts),
        float(first.mean() - last.mean()) / pooled,
    )


def _ranks(name: str, values: Tensor) -> np.ndarray:
    """Return ranks minus their mean; ties share theirs."""
    array = values.double().numpy(force=True)
    if array.ndim != 1 or not np.isfinite(array).all():
        raise InputError(f"{name} must be finite figures in one dimension.")
    _, place, count = np.unique(array, return_inverse=True, return_counts=True)
    if len(count) < 2:
        raise InputError(f"{name} is one figure {len(array)} times: it has no ranks to correlate.")
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks - ranks.mean()
