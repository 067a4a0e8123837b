"""Whether channels of a short half-life keep to few tokens.

The source takes how often the most writing tokens repeat as a stand-in for locality, without saying
how it counts. Here: 1 − distinct / all, over the tokens that :func:`rank_sequences` keeps.
Source: ProtoT, A.8, Table 21.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from prismlm.errors import InputError
from prismlm.instruments.channels.top_sequences import TopSequences


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
