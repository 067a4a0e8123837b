"""How far each head of attention reaches, and how signal heads differ from noise heads."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_finite, check_whole
from prismlm.models.attention import attention_layers, head_groups, reading_attention
from prismlm.models.decoders.mixers import chosen_layers
from prismlm.models.positions import check_window
from prismlm.outputs import write_csv
from prismlm.probes.reading import collect
from prismlm.probes.results import Report, Row, Table
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

MIN_VISIBLE = 16
NEAR = 4
"""The largest distance that counts as near."""
UNIFORM_SHARE = 0.9
"""From this share of the tokens that uniform attention attends to, a head's reach means nothing."""
SIGNIFICANT = 0.05
FIGURES = {
    "distance": ".1f",
    "distance_beyond_self": ".1f",
    "entropy": ".2f",
    "relative_entropy": ".2f",
    "self_share": ".2f",
    "near_share": ".2f",
    "first_share": ".2f",
}
REACH = tuple(FIGURES)[:4]
GROUPS = ("signal", "noise")


def head_uses(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    layers: Sequence[int] | None = None,
    least_visible: int = MIN_VISIBLE,
    progress: Reporter = SILENT,
) -> Table:
    """Return how far each head looks and what it looks at: means over query positions.

    Queries are the positions that their window owns and that see at least ``least_visible`` tokens
    of it, themselves included: at the start of a window every head looks near and to the first
    token, whatever it does elsewhere. Layers with a sliding window count as seeing all of it.

    Returns:
        A row for each head, by ``layer`` and ``head``; its ``group`` is signal, noise, or attention
        in a model whose heads are of one kind. The first row, of group ``uniform``, has the figures
        of 1/n_i on the n_i visible positions of the same queries. Of attention a_ij, j ≤ i:

        - ``distance``: Σ_j a_ij (i − j), in positions.
        - ``distance_beyond_self``: the same over positions other than i, relative to the attention
          there; 0 if there is none.
        - ``entropy``: −Σ_j a_ij ln a_ij, in nats; ``relative_entropy``: over ln n_i.
        - ``self_share``: a_ii. ``near_share``: Σ a_ij over distances 1 to 4. ``first_share``: a on
          the first token of the window, the "attention sink".
        - ``spectrum``: Σ a_ij over each of the ``bins`` of distances; sums to 1.
    """
    collector = HeadUseCollector(model, layers=layers, least_visible=least_visible)
    collect(model, batches, collector.watch, title="Reading heads", progress=progress)
    return collector.result()


class HeadUseCollector:
    """Collects the figures of :func:`head_uses` while the caller runs the forward passes."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: Sequence[int] | None = None,
        least_visible: int = MIN_VISIBLE,
    ) -> None:
        # The entropy of a single choice is relative to nothing.
        check_whole("least_visible", least_visible, 2)
        self._model, self.least_visible = model, least_visible
        self._groups = head_groups(model)
        layers = chosen_layers(len(attention_layers(model)), layers)
        self._tallies = {layer: AttentionTally(self._groups[-1].stop) for layer in sorted(layers)}
        self._uniform = AttentionTally(1)
        self._tokens = self._windows = 0
        self._chosen = self._visible = torch.empty(0)

    @property
    def queries(self) -> int:
        """How many query positions saw enough so far."""
        return self._uniform.queries

    def watch(self, batch: WindowBatch) -> AbstractContextManager[None]:
        """Collect the attention weights of the layers in a batch's forward pass."""
        mask = batch.attention_mask.to(self._model.device)
        self._visible = mask.cumsum(1) * mask
        self._chosen = batch.owned.to(mask.device) & (self._visible >= self.least_visible)
        causal = torch.ones_like(mask[0]).expand(mask.shape[1], -1).tril()
        uniform = (causal & mask[:, None]).double() / self._visible.clamp_min(1)[:, :, None]
        self._uniform.add(uniform[:, None], self._chosen, self._visible)
        self._tokens += int(batch.owned.sum())
        self._windows += int(batch.owned.any(1).sum())

        def read(layer: int, weights: Tensor) -> None:
            self._tallies[layer].add(weights, self._chosen, self._visible)

        return reading_attention(self._model, read, layers=tuple(self._tallies))

    def result(self) -> Table:
        """Return the figures of each head."""
        if not self.queries:
            raise InputError(
                f"none of {self._tokens} tokens sees {self.least_visible} tokens of its window: "
                "read longer texts in longer windows, or count queries that see fewer."
            )
        bins = distance_bins(self._uniform.profile.shape[1])
        uniform: Row = {"layer": None, "head": None, "group": "uniform"}
        rows = [uniform | self._uniform.figures(0, bins)]
        rows += [
            {"layer": layer, "head": head, "group": group.name} | tally.figures(head, bins)
            for layer, tally in self._tallies.items()
            for group in self._groups
            for head in range(group.start, group.stop)
        ]
        columns = {"layer": "", "head": "", "group": "", **FIGURES, "spectrum": ""}
        facts = {"tokens": self._tokens, "windows": self._windows, "queries": self.queries}
        facts |= {"least_visible": self.least_visible, "bins": bins, "layers": tuple(self._tallies)}
        return Table("Heads: means over queries", columns, tuple(rows), facts)


def distance_bins(length: int) -> tuple[tuple[int, int], ...]:
    """Return the bins of a spectrum up to distance T − 1: 0, 1, 2, 3–4, 5–8, 9–16, …"""
    bins = [(0, 0)]
    while bins[-1][1] < length - 1:
        low = bins[-1][1] + 1
        bins.append((low, max(1, 2 * (low - 1))))
    return tuple(bins)


class AttentionTally:
    """What the H heads of one layer did, summed over queries; float64, on the CPU.

    Attributes:
        queries: how many were added.
        profile: Σ over queries i of a(i, i − δ) by distance δ, [H, T] for the longest T so far.
        entropy, relative_entropy: Σ of entropies, nats [H], and of entropy / ln n_i.
        first: Σ of a on the window's first token [H].
    """

    def __init__(self, heads: int) -> None:
        self.queries = 0
        self.profile = torch.zeros(heads, 0, dtype=torch.float64)
        self.entropy, self.relative_entropy, self.first = torch.zeros(3, heads).double()

    def add(
        self,
        weights: Float[Tensor, "B H T T"],
        chosen: Bool[Tensor, "B T"],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        """Add the queries ``chosen``, which see ``visible`` positions each, themselves included.

        Windows may have padding before or behind, not within; it may hold any values.
        """
        length = weights.shape[-1]
        self.profile = F.pad(self.profile, (0, max(0, length - self.profile.shape[1])))
        for row, mask in enumerate(chosen):
            own = mask.nonzero()[:, 0]
            if not len(own):
                continue
            seen, start = visible[row, own], int(own[0] - visible[row, own[0]] + 1)
            dtype = torch.promote_types(weights.dtype, torch.float32)
            attention = weights[row, :, own].to(dtype)
            check_finite("attention weights", attention)
            entropy = torch.special.entr(attention).sum(-1, dtype=torch.float64)
            distance = own[:, None] - torch.arange(length, device=own.device)
            past = distance >= 0
            profile = torch.zeros(len(attention), length, dtype=torch.float64, device=own.device)
            profile.index_add_(1, distance[past], attention[:, past].double())
            self.queries += len(own)
            self.profile[:, :length] += profile.cpu()
            self.entropy += entropy.sum(-1).cpu()
            self.relative_entropy += (entropy / seen.double().log()).sum(-1).cpu()
            self.first += attention[:, :, start].sum(-1, dtype=torch.float64).cpu()

    def figures(self, head: int, bins: Sequence[tuple[int, int]]) -> Row:
        """Return the figures of one head, those of :func:`head_uses`."""
        profile = self.profile[head] / self.queries
        distance = float(profile @ torch.arange(len(profile), dtype=torch.float64))
        beyond = float(profile[1:].sum())
        return {
            "distance": distance,
            "distance_beyond_self": distance / beyond if beyond > 0 else 0.0,
            "entropy": float(self.entropy[head]) / self.queries,
            "relative_entropy": float(self.relative_entropy[head]) / self.queries,
            "self_share": float(profile[0]),
            "near_share": float(profile[1 : NEAR + 1].sum()),
            "first_share": float(self.first[head]) / self.queries,
            "spectrum": [float(profile[low : high + 1].sum()) for low, high in bins],
        }


def compare_groups(uses: Table) -> Table:
    """Compare signal with noise heads in each figure of :func:`head_uses`.

    Heads of different layers are not exchangeable, so ranks and permutations stay within layers.
    Heads of one model are not independent runs: a small p says that these heads differ by group,
    not that another model's would.

    Returns:
        A row for each ``measure``: the medians over ``signal`` and ``noise`` heads; ``effect`` and
        ``p`` of :func:`stratified_rank_test`, the effect above 0 where signal heads have the larger
        figure; how many layers have an effect above and below 0; and which group is ``larger`` at
        p < 0.05, marked "alike" where that group attends to nearly all it sees alike and so has no
        reach: exp(entropy) is 90 % of uniform attention's or more, in the median over its heads.
    """
    uniform, *heads = uses.rows
    if {head["group"] for head in heads} != set(GROUPS):
        raise InputError(
            "this model's heads are of one kind, so there are no groups to compare: expected "
            "signal and noise heads, as models of type 'prismlm_signal_noise' have."
        )
    of_group = {name: [head for head in heads if head["group"] == name] for name in GROUPS}
    reach = {
        name: statistics.median(math.exp(head["entropy"] - uniform["entropy"]) for head in own)
        for name, own in of_group.items()
    }
    alike = [name for name in GROUPS if reach[name] >= UNIFORM_SHARE]
    rows: list[Row] = []
    for measure in FIGURES:
        groups = [
            [[head[measure] for head in own if head["layer"] == n] for n in uses["layers"]]
            for own in of_group.values()
        ]
        effect, p = stratified_rank_test(*groups)
        each = [stratified_rank_test([own], [other])[0] for own, other in zip(*groups, strict=True)]
        larger = "unclear"
        if p < SIGNIFICANT and effect:
            larger = GROUPS[effect < 0]
            larger += ", alike" if measure in REACH and larger in alike else ""
        row: Row = {"measure": measure}
        for name, own in of_group.items():
            row[f"{name}_median"] = statistics.median(head[measure] for head in own)
        row |= {"effect": effect, "p": p, "layers_above": sum(one > 0 for one in each)}
        rows.append(row | {"layers_below": sum(one < 0 for one in each), "larger": larger})
    columns = {"measure": "", "signal_median": ".3f", "noise_median": ".3f", "effect": "+.2f",
               "p": ".2g", "layers_above": "", "layers_below": "", "larger": ""}  # fmt: skip
    per_layer = len(heads) // len(uses["layers"]) // 2
    facts: Row = dict.fromkeys(("signal_heads", "noise_heads"), per_layer)
    facts |= {"layers": len(uses["layers"]), "attend_everywhere_alike": alike}
    return Table("Signal against noise heads", columns, tuple(rows), facts)


def stratified_rank_test(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Compare two groups by rank within strata, such as the heads of each layer; exact.

    The sum over strata of the first group's ranks is compared with all of its values under
    permutation of the labels within strata: the distribution of each stratum is counted, ties
    included, and they are convolved. With one stratum it is Mann and Whitney's test; with several
    of one size it is van Elteren's statistic. SciPy has neither with ties.

    Returns:
        The effect 2 U / pairs − 1, Cliff's δ, U being the pairs of a stratum in which the first
        exceeds the second, ties counting half; and p of both sides, if within each stratum every
        assignment to groups is equally likely.
    """
    distribution, total, middle, pairs, u = np.ones(1), 0, 0, 0, 0.0
    for own, other in zip(first, second, strict=True):
        # Doubled they are whole, where ties share their mean.
        ranks = (2 * stats.rankdata([*own, *other])).astype(np.int64)
        size = len(own)
        # How many choices of k of the ranks have each sum.
        ways = np.zeros((size + 1, int(ranks.sum()) + 1))
        ways[0, 0] = 1
        for rank in ranks.tolist():
            ways[1:, rank:] += ways[:-1, :-rank].copy()
        distribution = np.convolve(distribution, ways[size] / ways[size].sum())
        total += int(ranks[:size].sum())
        middle += size * (len(ranks) + 1)
        pairs += size * len(other)
        u += ranks[:size].sum() / 2 - size * (size + 1) / 2
    # Sums are places in the distribution, whose mean is `middle`.
    away = np.abs(np.arange(len(distribution)) - middle)
    p = float(distribution[away >= abs(total - middle)].sum())
    return float(2 * u / pairs - 1), min(1.0, p)


def across_models(comparisons: Sequence[Table]) -> Table:
    """Return each figure's effect in several models, such as seeds: each is one observation.

    ``comparisons`` are :func:`compare_groups` of each. A row for each ``measure`` has the
    ``effects``, Cliff's δ of each model; models in which it is ``positive`` and ``negative``; and
    ``p`` of the two-sided sign test without zeros, which below 6 models cannot be below 0.05.
    """
    rows: list[Row] = []
    for same in zip(*(table.rows for table in comparisons), strict=True):
        effects = [row["effect"] for row in same]
        positive, negative = sum(e > 0 for e in effects), sum(e < 0 for e in effects)
        signs = positive + negative
        rows.append(
            {
                "measure": same[0]["measure"],
                "effects": effects,
                "each": "  ".join(f"{e:+.2f}" for e in effects).replace("-", "−"),
                "positive": positive,
                "negative": negative,
                "p": float(stats.binomtest(positive, signs).pvalue) if signs else 1.0,
            }
        )
    columns = {"measure": "", "each": "", "positive": "", "negative": "", "p": ".2g"}
    title = f"Cliff's δ of signal against noise heads in {len(comparisons)} models"
    return Table(title, columns, tuple(rows), {"least_p": 2 / 2 ** len(comparisons)})


def head_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    least_visible: int = MIN_VISIBLE,
    progress: Reporter = SILENT,
) -> Report:
    """Return :func:`head_uses` of a text, and :func:`compare_groups` of two kinds of heads."""
    check_window(model, sequences.length)
    if sequences.length < least_visible:
        raise InputError(
            f"windows of {sequences.length} tokens, of which no token sees {least_visible} tokens: "
            "read longer windows, or count queries that see fewer."
        )
    uses = head_uses(
        model, sequences.batches(), layers=layers, least_visible=least_visible, progress=progress
    )
    facts = {"corpus": asdict(sequences.part(uses["tokens"]))}
    try:
        return Report(name, facts, {"heads": uses, "comparison": compare_groups(uses)})
    except InputError as error:
        return Report(name, facts, {"heads": uses}, {"comparison": str(error)})


def write_heads(reports: Sequence[Report], path: str | os.PathLike[str]) -> None:
    """Write one CSV row a head: model, layer, head, group, its figures and its spectrum.

    Columns of the spectrum are named by the distances of their bin, as ``share_3_4``.
    """
    bins = max((report["heads"]["bins"] for report in reports), key=len)
    names = [f"share_{low}" if low == high else f"share_{low}_{high}" for low, high in bins]
    rows: list[Row] = []
    for report in reports:
        for head in report["heads"].rows:
            row = {"model": report.model} | head
            rows.append(row | dict(zip(names, row.pop("spectrum"), strict=False)))
    write_csv(path, ["model", "layer", "head", "group", *FIGURES, *names], rows)
