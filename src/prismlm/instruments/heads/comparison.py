"""Signal heads against noise heads, figure by figure, ranked within each layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from scipy import stats

from prismlm.errors import InputError
from prismlm.instruments.heads.head_use import HeadFigures, HeadUses

EVERYWHERE = 0.9
"""Of the tokens that uniform attention attends to, the share from which a head's reach says
nothing."""
MEASURES = tuple(field.name for field in fields(HeadFigures) if field.name != "spectrum")


@dataclass(frozen=True)
class GroupDifference:
    """One figure of signal heads beside that of noise heads.

    Attributes:
        signal_median: over signal heads.
        noise_median: over noise heads.
        u: pairs of heads of one layer in which the signal head's figure is larger, ties half.
        effect: rank-biserial, Cliff's δ: the share of such pairs less the share of the opposite;
            positive where signal heads have the larger figure.
        p: of both sides, under exchange of the labels within layers. Heads of one model are not
            independent runs: a small p says that these heads differ by group, not that another
            model's would.
    """

    signal_median: float
    noise_median: float
    u: float
    effect: float
    p: float


@dataclass(frozen=True)
class LayerDifference(GroupDifference):
    """The difference within one layer.

    Attributes:
        layer: from 0.
    """

    layer: int


@dataclass(frozen=True)
class Comparison(GroupDifference):
    """The difference over all layers, ranks taken within each.

    Attributes:
        measure: which of :class:`HeadFigures`.
        signal_heads: of each layer.
        noise_heads: of each layer.
        layers: each layer by itself.
    """

    measure: str
    signal_heads: int
    noise_heads: int
    layers: tuple[LayerDifference, ...]

    @property
    def layers_above(self) -> int:
        """In how many layers signal heads have the larger figure."""
        return sum(layer.effect > 0 for layer in self.layers)

    @property
    def layers_below(self) -> int:
        """In how many layers noise heads have the larger figure."""
        return sum(layer.effect < 0 for layer in self.layers)


@dataclass(frozen=True)
class AcrossModels:
    """The effect of one figure in several models, such as seeds: each model is one observation.

    Attributes:
        measure: which figure.
        effects: each model's Cliff's δ over its layers.
        positive: models in which signal heads have the larger figure.
        negative: models in which noise heads have.
        p: of both sides, of as many signs alike if either were equally likely. Below 6 models it
            cannot be below 0.05.
    """

    measure: str
    effects: tuple[float, ...]
    positive: int
    negative: int
    p: float


def compare_groups(uses: HeadUses) -> tuple[Comparison, ...]:
    """Compare signal with noise heads in each figure.

    Heads of different layers are not exchangeable, so ranks and permutations stay within layers.

    Raises:
        InputError: the model's heads are of one kind.
    """
    if {use.group for use in uses.heads} != {"signal", "noise"}:
        raise InputError(
            "this model's heads are of one kind, so there are no groups to compare: expected "
            "signal and noise heads, as models of type 'prismlm_signal_noise' have."
        )
    return tuple(_compare(uses, measure) for measure in MEASURES)


def groups_everywhere_alike(uses: HeadUses) -> frozenset[str]:
    """Return the groups whose heads attend nearly alike to all that they see, in the median.

    exp(H) of a head is how many tokens it attends to, in effect; uniform attention over the same
    queries attends to all. From ``EVERYWHERE`` of that on, how far a head reaches is how far back
    its window goes, and says nothing of the head.
    """
    share: dict[str, list[float]] = {}
    for head in uses.heads:
        share.setdefault(head.group, []).append(math.exp(head.entropy - uses.uniform.entropy))
    return frozenset(g for g, found in share.items() if statistics.median(found) >= EVERYWHERE)


def across_models(comparisons: Sequence[Sequence[Comparison]]) -> tuple[AcrossModels, ...]:
    """Return each figure's effect in every model, from :func:`compare_groups` of each.

    Raises:
        InputError: no model.
    """
    if not comparisons:
        raise InputError("no models to bring together: expected the comparisons of at least one.")
    found: list[AcrossModels] = []
    for same in zip(*comparisons, strict=True):
        effects = tuple(comparison.effect for comparison in same)
        positive, negative = (sum(sign * e > 0 for e in effects) for sign in (1, -1))
        found.append(AcrossModels(same[0].measure, effects, positive, negative, sign_test(effects)))
    return tuple(found)


def _compare(uses: HeadUses, measure: str) -> Comparison:
    groups = [
        [
            [float(getattr(u, measure)) for u in uses.heads if (u.layer, u.group) == (layer, name)]
            for layer in uses.layers
        ]
        for name in ("signal", "noise")
    ]
    signal, noise = groups
    layers = tuple(
        LayerDifference(*_difference([own], [other]), layer=layer)
        for layer, own, other in zip(uses.layers, signal, noise, strict=True)
    )
    return Comparison(
        *_difference(signal, noise),
        measure=measure,
        signal_heads=len(signal[0]),
        noise_heads=len(noise[0]),
        layers=layers,
    )


def _difference(
    signal: Sequence[Sequence[float]], noise: Sequence[Sequence[float]]
) -> tuple[float, float, float, float, float]:
    own, other = (statistics.median([x for part in g for x in part]) for g in (signal, noise))
    return own, other, *stratified_rank_test(signal, noise)


def stratified_rank_test(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """Compare two groups by rank within strata, such as the heads of each layer.

    The sum over strata of the first group's ranks is compared with all of its values under
    permutation of the labels within strata; the distribution of each stratum is counted, ties
    included, and they are convolved. With one stratum it is Mann and Whitney's exact test; with
    several of one size it is van Elteren's statistic. Nothing is drawn at random.

    Args:
        first: the first group's figures in each stratum, at least one.
        second: the second group's.

    Returns:
        Mann and Whitney's U of the first group, summed over strata: pairs of a stratum in which the
        first exceeds the second, ties counting half; the effect 2 U / pairs − 1, the rank-biserial
        correlation, also Cliff's δ: −1 to 1, 0 for none; and p of both sides, if within each
        stratum every assignment to groups is equally likely.
    """
    distribution, total, middle, pairs, u = np.ones(1), 0, 0, 0, 0.0
    for own, other in zip(first, second, strict=True):
        # Doubled they are whole, where ties share their mean.
        ranks = (2 * stats.rankdata([*own, *other])).astype(np.int64)
        size = len(own)
        sums = _rank_sums(ranks, size)
        distribution = np.convolve(distribution, sums)
        total += int(ranks[:size].sum())
        middle += size * (len(ranks) + 1)
        pairs += size * len(other)
        u += ranks[:size].sum() / 2 - size * (size + 1) / 2
    # So sums are places in the distribution; its mean is `middle`.
    away = np.abs(np.arange(len(distribution)) - middle)
    p = float(distribution[away >= abs(total - middle)].sum())
    return float(u), float(2 * u / pairs - 1), min(1.0, p)


def sign_test(values: Sequence[float]) -> float:
    """Return p of both sides for as many positive values, if either sign is equally likely.

    Zeros are left out; without any other value p is 1.
    """
    positive = sum(value > 0 for value in values)
    count = positive + sum(value < 0 for value in values)
    return float(stats.binomtest(positive, count).pvalue) if count else 1.0


def _rank_sums(ranks: np.ndarray, size: int) -> np.ndarray:
    """Return the probability of each sum of ``size`` of these ranks, all choices equally likely."""
    ways = np.zeros((size + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks.tolist():
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    return ways[size] / ways[size].sum()
