"""What each head of attention does over text, and how signal heads differ from noise heads."""

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
from prismlm.instruments.forward import collect, documents_of
from prismlm.instruments.results import Report, Row, Table
from prismlm.models.attention import attention_layers, head_groups, reading_attention
from prismlm.models.decoders.mixers import chosen_layers
from prismlm.models.positions import check_window
from prismlm.outputs import write_csv
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

LEAST_VISIBLE = 16
NEAR = 4
"""The farthest distance that counts as near."""
EVERYWHERE = 0.9
"""Of the tokens that uniform attention attends to, the share from which a head's reach says
nothing."""
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
Bins = Sequence[tuple[int, int]]


def distance_bins(length: int) -> tuple[tuple[int, int], ...]:
    """Return the bins of a spectrum up to distance T − 1: 0, 1, 2, 3–4, 5–8, 9–16, …

    The last is as wide as the others of its kind would be.
    """
    bins = [(0, 0)]
    high = 1
    while bins[-1][1] < length - 1:
        bins.append((bins[-1][1] + 1, high))
        high *= 2
    return tuple(bins)


def head_uses(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    layers: Sequence[int] | None = None,
    least_visible: int = LEAST_VISIBLE,
    progress: Reporter = SILENT,
) -> Table:
    """Return how far each head looks and what it looks at: means over query positions.

    Queries are the positions that their window owns and that see at least ``least_visible``
    tokens of it, themselves among them: at the start of a window every head looks near, and to
    the first token, whatever it does elsewhere. Layers with a sliding window count as seeing the
    whole window. One layer's weights of one batch are held at a time.

    Args:
        model: any decoder with attention.
        batches: text; padding before or behind a window counts nothing.
        layers: which, from 0; None for all.
        least_visible: at least 2, since the entropy of a single choice is relative to nothing.
        progress: shows the reading.

    Returns:
        A row for each head, by ``layer`` and ``head``, its place in the layer's attention weights;
        ``group`` is signal, noise, or attention in a model whose heads are of one kind. The first
        row, of group ``uniform``, has the figures of 1/n_i for every visible position at the same
        queries. Of a head's attention a_ij, j ≤ i, which sums to 1 over j:

        - ``distance``: Σ_j a_ij (i − j), in positions.
        - ``distance_beyond_self``: the same over attention to other positions than i, relative to
          how much of it there is; 0 if there is none.
        - ``entropy``: −Σ_j a_ij ln a_ij, in nats; ``relative_entropy``: entropy / ln n_i, n_i the
          number of visible positions.
        - ``self_share``: a_ii. ``near_share``: Σ a_ij over distances 1 to 4. ``first_share``: a on
          the first token of the window, the "attention sink"; it counts at its distance too.
        - ``spectrum``: Σ a_ij over each of the ``bins`` of distances; sums to 1.

    Raises:
        InputError: a model without attention or without that layer, windows longer than its
            positions, no query that sees enough, or weights that are not finite.
    """
    collector = HeadUseCollector(model, layers=layers, least_visible=least_visible)
    collect(model, batches, collector, title="Reading heads", progress=progress)
    return collector.result()


class HeadUseCollector:
    """Collects the figures of :func:`head_uses` while the caller runs the forward passes.

    Args:
        model, layers, least_visible: as of :func:`head_uses`.

    Raises:
        InputError: a model without attention, or least_visible below 2.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: Sequence[int] | None = None,
        least_visible: int = LEAST_VISIBLE,
    ) -> None:
        check_whole("least_visible", least_visible, 2)
        self._model = model
        self._groups = head_groups(model)
        chosen = chosen_layers(len(attention_layers(model)), layers)
        self._layers = tuple(sorted(set(chosen)))
        self.least_visible = least_visible
        heads = self._groups[-1].stop
        self._tallies = {layer: AttentionTally(heads) for layer in self._layers}
        self._uniform = AttentionTally(1)
        self._tokens = self._windows = 0
        self._chosen = self._visible = torch.empty(0)

    @property
    def queries(self) -> int:
        """How many query positions saw enough so far."""
        return self._uniform.queries

    def listening(self) -> AbstractContextManager[None]:
        """Take in the attention weights of the layers during the block.

        Raises:
            InputError: the model has not that layer.
        """
        return reading_attention(self._model, self._read, layers=self._layers)

    def begin(self, batch: WindowBatch) -> None:
        """Say which batch the next forward pass is of."""
        mask = batch.attention_mask.to(self._model.device)
        self._visible = mask.cumsum(1) * mask
        enough = self._visible >= self.least_visible
        self._chosen = batch.owned.to(self._model.device) & enough
        self._uniform.add(_uniform(mask, self._visible), self._chosen, self._visible)
        self._tokens += int(batch.owned.sum())
        self._windows += int(batch.owned.any(1).sum())

    def _read(self, layer: int, weights: Tensor) -> None:
        self._tallies[layer].add(weights, self._chosen, self._visible)

    def result(self) -> Table:
        """Return the figures of each head.

        Raises:
            InputError: no query saw enough.
        """
        if not self.queries:
            raise InputError(
                f"none of {self._tokens} tokens sees {self.least_visible} tokens of its window: "
                "read longer texts in longer windows, or count queries that see fewer."
            )
        bins = distance_bins(self._uniform.profile.shape[1])
        uniform: Row = {"layer": None, "head": None, "group": "uniform"}
        rows = [uniform | figures_of(self._uniform, 0, bins)]
        rows += [
            {"layer": layer, "head": head, "group": group.name} | figures_of(tally, head, bins)
            for layer, tally in self._tallies.items()
            for group in self._groups
            for head in range(group.start, group.stop)
        ]
        return Table(
            "Heads: means over queries",
            {"layer": "", "head": "", "group": "", **FIGURES, "spectrum": ""},
            tuple(rows),
            {
                "tokens": self._tokens,
                "windows": self._windows,
                "queries": self.queries,
                "least_visible": self.least_visible,
                "bins": bins,
                "layers": self._layers,
            },
        )


def _uniform(mask: Tensor, visible: Tensor) -> Tensor:
    """Return 1/n_i on the n_i positions that i sees, [B, 1, T, T]."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
    sees = (causal & mask[:, None]).double()
    return (sees / visible.clamp_min(1)[:, :, None])[:, None]


def figures_of(tally: AttentionTally, head: int, bins: Bins) -> Row:
    """Return the figures of one head, those of :func:`head_uses`."""
    profile = tally.profile[head] / tally.queries
    distances = torch.arange(len(profile), dtype=torch.float64)
    distance = float(profile @ distances)
    beyond = float(profile[1:].sum())
    return {
        "distance": distance,
        "distance_beyond_self": distance / beyond if beyond > 0 else 0.0,
        "entropy": float(tally.entropy[head]) / tally.queries,
        "relative_entropy": float(tally.relative_entropy[head]) / tally.queries,
        "self_share": float(profile[0]),
        "near_share": float(profile[1 : NEAR + 1].sum()),
        "first_share": float(tally.first[head]) / tally.queries,
        "spectrum": [float(profile[low : high + 1].sum()) for low, high in bins],
    }


class AttentionTally:
    """What the heads of one layer did, summed over queries; float64, on the CPU.

    Attributes:
        queries: how many query positions were added.
        profile: attention by distance, [H, T] for the longest T so far: Σ over queries i of
            a(i, i − δ).
        entropy: Σ of −Σ_j a_ij ln a_ij, nats [H].
        relative_entropy: Σ of entropy / ln n_i for n_i visible positions [H].
        first: Σ of a on the window's first token [H].
    """

    def __init__(self, heads: int) -> None:
        self.queries = 0
        self.profile = torch.zeros(heads, 0, dtype=torch.float64)
        self.entropy = torch.zeros(heads, dtype=torch.float64)
        self.relative_entropy = torch.zeros(heads, dtype=torch.float64)
        self.first = torch.zeros(heads, dtype=torch.float64)

    def add(
        self,
        weights: Float[Tensor, "B H T T"],
        chosen: Bool[Tensor, "B T"],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        """Take the queries ``chosen``, which see ``visible`` positions each, themselves among them.

        Windows may have padding before or behind, not within.

        Raises:
            InputError: a weight that is not finite.
        """
        queries = [row.nonzero()[:, 0] for row in chosen]
        self.queries += sum(map(len, queries))
        length = weights.shape[-1]
        longest = max(length, self.profile.shape[1])
        self.profile = F.pad(self.profile, (0, longest - self.profile.shape[1]))
        # One head at a time: what is made of its weights is larger than they are.
        for head in range(weights.shape[1]):
            self._add_head(head, weights[:, head], queries, visible)

    def _add_head(
        self,
        head: int,
        weights: Float[Tensor, "B T T"],
        queries: list[Tensor],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        summed = torch.zeros(weights.shape[1:], dtype=torch.float64, device=weights.device)
        dtype = torch.promote_types(weights.dtype, torch.float32)
        for row, own in enumerate(queries):
            if not len(own):
                continue
            # What padding attends to is no matter, finite or not.
            attention = weights[row, own].to(dtype)
            summed[own] += attention
            entropy = torch.special.entr(attention).sum(-1, dtype=torch.float64)
            seen = visible[row, own]
            self.entropy[head] += entropy.sum().cpu()
            self.relative_entropy[head] += (entropy / seen.double().log()).sum().cpu()
            start = int(own[0] - seen[0] + 1)
            self.first[head] += attention[:, start].sum(dtype=torch.float64).cpu()
        profile = _diagonals(summed).cpu()
        check_finite("attention weights", profile)
        self.profile[head, : len(profile)] += profile


def _diagonals(summed: Float[Tensor, "T T"]) -> Float[Tensor, " T"]:
    """Return the sums over i of the elements (i, i − δ) for δ = 0 … T − 1."""
    length = len(summed)
    # With T zeros after each mirrored row and rows read 2T − 1 wide, row i shifts by i, so that
    # the column of an element is T − 1 + δ.
    wide = F.pad(summed.flip(-1), (0, length)).flatten()[:-length]
    return wide.view(length, 2 * length - 1).sum(0)[length - 1 :]


def compare_groups(uses: Table) -> Table:
    """Compare signal with noise heads in each figure of :func:`head_uses`.

    Heads of different layers are not exchangeable, so ranks and permutations stay within layers.
    Heads of one model are not independent runs: a small p says that these heads differ by group,
    not that another model's would.

    Returns:
        A row for each ``measure``: the medians over ``signal`` and ``noise`` heads; ``u``, pairs of
        heads of one layer in which the signal head's figure is larger, ties half; the ``effect``,
        Cliff's δ, above 0 where signal heads have the larger figure; ``p`` of both sides; how many
        layers have an effect above and below 0; the same figures of each of the ``layers``; and
        which group is ``larger``, at p < 0.05. A group that attends to all it sees alike has no
        reach to speak of, and is marked.

    Raises:
        InputError: the model's heads are of one kind.
    """
    heads = uses.rows[1:]
    if {head["group"] for head in heads} != {"signal", "noise"}:
        raise InputError(
            "this model's heads are of one kind, so there are no groups to compare: expected "
            "signal and noise heads, as models of type 'prismlm_signal_noise' have."
        )
    layers, alike = uses["layers"], groups_everywhere_alike(uses)
    rows: list[Row] = []
    for measure in FIGURES:
        groups = [
            [[h[measure] for h in heads if (h["layer"], h["group"]) == (n, name)] for n in layers]
            for name in ("signal", "noise")
        ]
        row = {"measure": measure} | _difference(*groups)
        each = [_difference([own], [other]) for own, other in zip(*groups, strict=True)]
        row["layers_above"] = sum(one["effect"] > 0 for one in each)
        row["layers_below"] = sum(one["effect"] < 0 for one in each)
        row["layers"] = [{"layer": n} | one for n, one in zip(layers, each, strict=True)]
        row["larger"] = _larger(row, alike)
        rows.append(row)
    sizes = [sum((h["layer"], h["group"]) == (layers[0], g) for h in heads) for g in
             ("signal", "noise")]  # fmt: skip
    return Table(
        "Signal against noise heads",
        {"measure": "", "signal_median": ".3f", "noise_median": ".3f", "effect": "+.2f",
         "p": ".2g", "layers_above": "", "layers_below": "", "larger": ""},
        tuple(rows),
        {"signal_heads": sizes[0], "noise_heads": sizes[1], "layers": len(layers),
         "attend_everywhere_alike": sorted(alike)},
    )  # fmt: skip


def _larger(row: Row, alike: frozenset[str]) -> str:
    if row["p"] >= SIGNIFICANT or not row["effect"]:
        return "unclear"
    group = "signal" if row["effect"] > 0 else "noise"
    return f"{group}, alike" if row["measure"] in REACH and group in alike else group


def groups_everywhere_alike(uses: Table) -> frozenset[str]:
    """Return the groups whose heads attend nearly alike to all that they see, in the median.

    exp(H) of a head is how many tokens it attends to, in effect; uniform attention over the same
    queries attends to all. From ``EVERYWHERE`` of that on, how far a head reaches is how far back
    its window goes, and says nothing of the head.
    """
    uniform, *heads = uses.rows
    share: dict[str, list[float]] = {}
    for head in heads:
        share.setdefault(head["group"], []).append(math.exp(head["entropy"] - uniform["entropy"]))
    return frozenset(g for g, found in share.items() if statistics.median(found) >= EVERYWHERE)


def across_models(comparisons: Sequence[Table]) -> Table:
    """Return each figure's effect in several models, such as seeds: each is one observation.

    Args:
        comparisons: :func:`compare_groups` of each.

    Returns:
        A row for each ``measure``: the ``effects``, Cliff's δ of each model; models in which it is
        ``positive`` and ``negative``; and ``p`` of both sides, of as many signs alike if either
        were equally likely: below 6 models it cannot be below 0.05.

    Raises:
        InputError: no model.
    """
    if not comparisons:
        raise InputError("no models to bring together: expected the comparisons of at least one.")
    rows: list[Row] = []
    for same in zip(*(table.rows for table in comparisons), strict=True):
        effects = [row["effect"] for row in same]
        row = {"measure": same[0]["measure"], "effects": effects}
        row["each"] = "  ".join(f"{e:+.2f}" for e in effects).replace("-", "−")
        row["positive"], row["negative"] = (sum(s * e > 0 for e in effects) for s in (1, -1))
        rows.append(row | {"p": sign_test(effects)})
    columns = {"measure": "", "each": "", "positive": "", "negative": "", "p": ".2g"}
    title = f"Cliff's δ of signal against noise heads in {len(comparisons)} models"
    return Table(title, columns, tuple(rows), {"least_p": 2 / 2 ** len(comparisons)})


def _difference(signal: Sequence[Sequence[float]], noise: Sequence[Sequence[float]]) -> Row:
    own, other = (statistics.median([x for part in g for x in part]) for g in (signal, noise))
    u, effect, p = stratified_rank_test(signal, noise)
    return {"signal_median": own, "noise_median": other, "u": u, "effect": effect, "p": p}


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


def head_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    least_visible: int = LEAST_VISIBLE,
    progress: Reporter = SILENT,
) -> Report:
    """Return :func:`head_uses` over a text, and :func:`compare_groups` where there are two kinds.

    Raises:
        InputError: as :func:`head_uses`, or a split without documents.
    """
    check_window(model, sequences.length)
    documents_of(sequences.corpus, sequences.split)
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

    Columns of the spectrum are named by the distances of their bin, as ``share_3_4``. The row of
    uniform attention has the group "uniform" and no layer.
    """
    bins = max((report["heads"]["bins"] for report in reports), key=len)
    names = [f"share_{low}" if low == high else f"share_{low}_{high}" for low, high in bins]
    rows: list[Row] = []
    for report in reports:
        for row in report["heads"].rows:
            shares = dict(zip(names, row["spectrum"], strict=False))
            kept = {key: value for key, value in row.items() if key != "spectrum"}
            rows.append({"model": report.model, **kept, **shares})
    write_csv(path, ["model", "layer", "head", "group", *FIGURES, *names], rows)
