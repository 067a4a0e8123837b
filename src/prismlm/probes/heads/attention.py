"""How far each attention head reaches, and how signal heads differ from noise heads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError, check_finite, check_whole
from prismlm.models.attention import attention_layers, head_groups, reading_attention
from prismlm.models.decoders.protot import chosen_layers
from prismlm.models.device import check_window
from prismlm.models.seam import capture, run_decoder
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.models.watch import evaluating
from prismlm.probes.results import Report, Row, Table
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

MIN_VISIBLE = 16
MAX_NEAR = 4
"""The largest distance that counts as near."""
UNIFORM_SHARE = 0.9
"""A head that attends to this share of the tokens of uniform attention has no meaningful reach."""
SIGNIFICANT = 0.05
FIGURES = {"distance": ".1f", "distance_beyond_self": ".1f", "entropy": ".2f",
           "relative_entropy": ".2f", "self_share": ".2f", "near_share": ".2f",
           "first_share": ".2f"}  # fmt: skip
REACH = tuple(FIGURES)[:4]
GROUPS = ("signal", "noise")


def collect(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    observe: Callable[[WindowBatch], AbstractContextManager[None]],
    *,
    title: str,
    progress: Reporter = SILENT,
) -> None:
    """Run batches through the decoder in evaluation mode, each pass inside ``observe(batch)``."""
    with evaluating(model), progress.task(title) as task:
        for batch in batches:
            check_window(model, batch.input_ids.shape[1])
            ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
            with observe(batch):
                if uncertainty_of(model) is None:
                    run_decoder(model, ids, mask)
                else:
                    # The codes that are fed back depend on the whole model's logits.
                    with capture(model, logits=False):
                        model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
            task.advance(int(batch.owned.sum()))


def head_uses(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    layers: Sequence[int] | None = None,
    least_visible: int = MIN_VISIBLE,
    progress: Reporter = SILENT,
) -> Table:
    """Return how far each head looks and what it attends to: means over query positions.

    Queries are the positions that their window owns and that see at least ``least_visible`` tokens
    of it, themselves included: at the start of a window every head attends to near tokens and the
    first. Layers with a sliding window count as seeing the whole window.

    There is a row for each head, with its ``group``: signal, noise, or attention in a model with
    heads of one kind. The first row, ``uniform``, is equal attention of the same queries to all
    visible tokens; there are no rows if no query sees enough tokens. Figures are defined in
    docs/signal_noise_attention.md; ``spectrum`` is over the ``bins`` of distances.
    """
    # With one visible token the relative entropy is undefined.
    check_whole("least_visible", least_visible, 2)
    groups = head_groups(model)
    layers = sorted(chosen_layers(len(attention_layers(model)), layers))
    tallies = {layer: AttentionTally(groups[-1].stop) for layer in layers}
    uniform, tokens, windows = AttentionTally(1), 0, 0

    def observe(batch: WindowBatch) -> AbstractContextManager[None]:
        nonlocal tokens, windows
        mask = batch.attention_mask.to(model.device)
        visible = mask.cumsum(1) * mask
        queries = batch.owned.to(mask.device) & (visible >= least_visible)
        causal = torch.ones_like(mask[0]).expand(mask.shape[1], -1).tril()
        equal = (causal & mask[:, None]).double() / visible.clamp_min(1)[:, :, None]
        uniform.add(equal[:, None], queries, visible)
        tokens += int(batch.owned.sum())
        windows += int(batch.owned.any(1).sum())
        return reading_attention(
            model, lambda layer, a: tallies[layer].add(a, queries, visible), layers=layers
        )

    collect(model, batches, observe, title="Reading heads", progress=progress)
    bins, rows = distance_bins(uniform.profile.shape[1]), list[Row]()
    if uniform.queries:
        rows.append({"layer": None, "head": None, "group": "uniform"} | uniform.figures(0, bins))
        rows += [
            {"layer": layer, "head": head, "group": group.name} | tally.figures(head, bins)
            for layer, tally in tallies.items()
            for group in groups
            for head in range(group.start, group.stop)
        ]
    columns = {"layer": "", "head": "", "group": "", **FIGURES, "spectrum": ""}
    facts = {"tokens": tokens, "windows": windows, "queries": uniform.queries}
    facts |= {"least_visible": least_visible, "bins": bins, "layers": tuple(layers)}
    return Table("Heads: means over queries", columns, tuple(rows), facts)


def distance_bins(length: int) -> tuple[tuple[int, int], ...]:
    """Return the bins of a spectrum up to distance T − 1: 0, 1, 2, 3–4, 5–8, 9–16, …"""
    bins = [(0, 0)]
    while bins[-1][1] < length - 1:
        low = bins[-1][1] + 1
        bins.append((low, max(1, 2 * (low - 1))))
    return tuple(bins)


class AttentionTally:
    """Sums of the attention of the H heads of one layer over queries; float64, on the CPU."""

    def __init__(self, heads: int) -> None:
        self.queries = 0
        # Σ_i a(i, i − δ) by distance δ, [H, T] for the longest T so far.
        self.profile = torch.zeros(heads, 0, dtype=torch.float64)
        # Entropy, nats, entropy / ln n_i, and attention to the window's first token.
        self.sums = torch.zeros(3, heads, dtype=torch.float64)

    def add(
        self,
        weights: Float[Tensor, "B H T T"],
        queries: Bool[Tensor, "B T"],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        """Add ``queries``, each of which sees ``visible`` positions, itself included.

        Windows may have padding before or after, not inside; it may hold any values.
        """
        length = weights.shape[-1]
        self.profile = F.pad(self.profile, (0, max(0, length - self.profile.shape[1])))
        for row, mask in enumerate(queries):
            positions = mask.nonzero()[:, 0]
            if not len(positions):
                continue
            seen = visible[row, positions]
            start = int(positions[0] - seen[0] + 1)
            dtype = torch.promote_types(weights.dtype, torch.float32)
            attention = weights[row, :, positions].to(dtype)
            check_finite("attention weights", attention)
            entropy = torch.special.entr(attention).sum(-1, dtype=torch.float64)
            relative, first = entropy / seen.double().log(), attention[:, :, start].double()
            distance = positions[:, None] - torch.arange(length, device=positions.device)
            past = distance >= 0
            profile = entropy.new_zeros(len(attention), length)
            profile.index_add_(1, distance[past], attention[:, past].double())
            self.queries += len(positions)
            self.profile[:, :length] += profile.cpu()
            self.sums += torch.stack([entropy, relative, first]).sum(-1).cpu()

    def figures(self, head: int, bins: Sequence[tuple[int, int]]) -> Row:
        """Return the figures of one head, as :func:`head_uses`."""
        profile = self.profile[head] / self.queries
        entropy, relative_entropy, first = (self.sums[:, head] / self.queries).tolist()
        distance = float(profile @ torch.arange(len(profile), dtype=torch.float64))
        beyond = float(profile[1:].sum())
        return {
            "distance": distance,
            "distance_beyond_self": distance / beyond if beyond > 0 else 0.0,
            "entropy": entropy,
            "relative_entropy": relative_entropy,
            "self_share": float(profile[0]),
            "near_share": float(profile[1 : MAX_NEAR + 1].sum()),
            "first_share": first,
            "spectrum": [float(profile[low : high + 1].sum()) for low, high in bins],
        }


def compare_groups(uses: Table) -> Table:
    """Compare signal with noise heads in each figure of :func:`head_uses`.

    Ranks and permutations stay within layers. Heads of one model are not independent: a small p
    says that these heads differ by group, not that another model's would. ``effect`` and ``p`` are
    those of :func:`stratified_rank_test`; the group that is ``larger`` at p < 0.05 is followed by
    "alike" if it attends almost uniformly, so that its reach means nothing.
    """
    uniform, *heads = uses.rows
    if {head["group"] for head in heads} != set(GROUPS):
        raise InputError(
            "this model's heads are of one kind, so there are no groups to compare: expected "
            "signal and noise heads, as in models of type 'prismlm_signal_noise'."
        )
    by_group = {name: [head for head in heads if head["group"] == name] for name in GROUPS}
    alike = [
        name
        for name, group in by_group.items()
        if statistics.median(math.exp(head["entropy"] - uniform["entropy"]) for head in group)
        >= UNIFORM_SHARE
    ]
    rows: list[Row] = []
    for measure in FIGURES:
        signal, noise = (
            [[head[measure] for head in group if head["layer"] == n] for n in uses["layers"]]
            for group in by_group.values()
        )
        effect, p = stratified_rank_test(signal, noise)
        larger = "unclear"
        if p < SIGNIFICANT and effect:
            larger = GROUPS[effect < 0]
            larger += ", alike" if measure in REACH and larger in alike else ""
        row: Row = {"measure": measure}
        for name, group in by_group.items():
            row[f"{name}_median"] = statistics.median(head[measure] for head in group)
        rows.append(row | {"effect": effect, "p": p, "larger": larger})
    columns = {"measure": "", "signal_median": ".3f", "noise_median": ".3f", "effect": "+.2f",
               "p": ".2g", "larger": ""}  # fmt: skip
    per_layer = len(heads) // len(uses["layers"]) // 2
    facts: Row = dict.fromkeys(("signal_heads", "noise_heads"), per_layer)
    facts |= {"layers": len(uses["layers"]), "attend_everywhere_alike": alike}
    return Table("Signal against noise heads", columns, tuple(rows), facts)


def stratified_rank_test(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Compare two groups by rank within strata, such as the heads of each layer; exact.

    The first group's rank sum over strata is compared with its distribution under permutation of
    the labels within strata. With one stratum it is the Mann–Whitney test; with several of equal
    sizes, van Elteren's. SciPy has neither with ties.

    Returned are the effect 2 U / pairs − 1, Cliff's δ, U being the pairs within strata in which the
    first exceeds the second, ties counting half, and the two-sided p.
    """
    distribution, total, mean, pairs, u = np.ones(1), 0, 0, 0, 0.0
    for a, b in zip(first, second, strict=True):
        # Doubled ranks are integers, also if ties share their mean.
        ranks = (2 * stats.rankdata([*a, *b])).astype(np.int64)
        size = len(a)
        # How many choices of k of the ranks have each sum.
        ways = np.zeros((size + 1, int(ranks.sum()) + 1))
        ways[0, 0] = 1
        for rank in ranks.tolist():
            ways[1:, rank:] += ways[:-1, :-rank].copy()
        distribution = np.convolve(distribution, ways[size] / ways[size].sum())
        total += int(ranks[:size].sum())
        mean += size * (len(ranks) + 1)
        pairs += size * len(b)
        u += ranks[:size].sum() / 2 - size * (size + 1) / 2
    deviations = np.abs(np.arange(len(distribution)) - mean)
    p = float(distribution[deviations >= abs(total - mean)].sum())
    return float(2 * u / pairs - 1), min(1.0, p)


def across_models(comparisons: Sequence[Table]) -> Table:
    """Return each figure's effects in several models, such as seeds, from :func:`compare_groups`.

    ``p`` is of the two-sided sign test without zeros: with fewer than 6 models it exceeds 0.05.
    """
    rows: list[Row] = []
    for by_model in zip(*(table.rows for table in comparisons), strict=True):
        effects = [row["effect"] for row in by_model]
        positive, negative = sum(e > 0 for e in effects), sum(e < 0 for e in effects)
        signs = positive + negative
        p = float(stats.binomtest(positive, signs).pvalue) if signs else 1.0
        row: Row = {"measure": by_model[0]["measure"], "effects": effects}
        row["each"] = "  ".join(f"{e:+.2f}" for e in effects).replace("-", "−")
        rows.append(row | {"positive": positive, "negative": negative, "p": p})
    columns = {"measure": "", "each": "", "positive": "", "negative": "", "p": ".2g"}
    title = f"Cliff's δ of signal against noise heads in {len(comparisons)} models"
    return Table(title, columns, tuple(rows), {"least_p": 2 / 2 ** len(comparisons)})


def head_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    progress: Reporter = SILENT,
) -> Report:
    """Return :func:`head_uses` of a text, and :func:`compare_groups` of two kinds of heads."""
    check_window(model, sequences.length)
    uses = head_uses(model, sequences.batches(), layers=layers, progress=progress)
    if not uses.rows:
        raise InputError(
            f"none of {uses['tokens']:,} tokens sees {MIN_VISIBLE} tokens of its window of "
            f"{sequences.length}: read longer texts, or longer windows (--length)."
        )
    facts = {"corpus": asdict(sequences.part(uses["tokens"]))}
    try:
        return Report(name, facts, {"heads": uses, "comparison": compare_groups(uses)})
    except InputError as error:
        return Report(name, facts, {"heads": uses}, {"comparison": str(error)})
