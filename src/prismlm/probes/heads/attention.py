"""How far each attention head reaches, and how signal heads differ from noise heads."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from scipy import stats
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from prismlm.corpus.windows import Sequences, WindowBatch
from prismlm.errors import InputError, check_finite
from prismlm.models.attention import attention_layers, head_groups, reading_attention
from prismlm.models.decoders.protot import chosen_layers
from prismlm.models.device import check_window
from prismlm.models.seam import capture
from prismlm.models.watch import evaluating
from prismlm.probes.results import Report, Row, Table
from prismlm.progress import SILENT, Reporter

MIN_VISIBLE = 16
MAX_NEAR = 4
"""The largest distance that counts as near."""
SIGNIFICANT = 0.05
FIGURES = (
    "distance", "distance_beyond_self", "entropy", "relative_entropy", "self_share", "near_share",
    "first_share",
)  # fmt: skip
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
            # The whole model, since codes that are fed back depend on its logits.
            with observe(batch), capture(model, logits=False):
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

    Queries are the positions that their window owns and that see ``least_visible`` (at least 2) or
    more of its tokens, themselves included: at the start of a window every head attends to near
    tokens and the first. Layers with a sliding window count as seeing the whole window.

    There is a row for each head, with its ``group``: signal, noise, or attention in a model with
    heads of one kind. The first row, ``uniform``, is equal attention of the same queries to all
    visible tokens; there are no rows if no query sees enough tokens. Figures are defined in
    docs/signal_noise_attention.md; ``spectrum`` is over the ``bins`` of distances.
    """
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
    # Without the distance, (1 − self share) · distance beyond self, the table fits 80 columns.
    columns = "layer head group distance_beyond_self:.1f entropy:.2f relative_entropy:.2f"
    columns += " self_share:.2f near_share:.2f first_share:.2f spectrum"
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
    those of :func:`stratified_rank_test`; ``larger`` is the group with the larger figure at
    p < 0.05. Compare the entropy of a group with that of the row ``uniform``: where they are alike,
    its reach means nothing.
    """
    heads = uses.rows[1:]
    if {head["group"] for head in heads} != set(GROUPS):
        raise InputError(
            "this model's heads are of one kind, so there are no groups to compare: expected "
            "signal and noise heads, as in models of type 'prismlm_signal_noise'."
        )
    by_group = {name: [head for head in heads if head["group"] == name] for name in GROUPS}
    rows: list[Row] = []
    for measure in FIGURES:
        signal, noise = (
            [[head[measure] for head in group if head["layer"] == n] for n in uses["layers"]]
            for group in by_group.values()
        )
        effect, p = stratified_rank_test(signal, noise)
        row: Row = {"measure": measure}
        for name, group in by_group.items():
            row[f"{name}_median"] = statistics.median(head[measure] for head in group)
        larger = GROUPS[effect < 0] if p < SIGNIFICANT and effect else "unclear"
        rows.append(row | {"effect": effect, "p": p, "larger": larger})
    columns = "measure signal_median:.3f noise_median:.3f effect:+.2f p:.2g larger"
    per_layer = len(heads) // len(uses["layers"]) // 2
    facts: Row = dict.fromkeys(("signal_heads", "noise_heads"), per_layer)
    title = "Signal against noise heads"
    return Table(title, columns, tuple(rows), facts | {"layers": len(uses["layers"])})


def stratified_rank_test(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Compare two groups by rank within strata, such as the heads of each layer.

    Returned are the effect 2 U / pairs − 1, Cliff's δ, U being the pairs within strata in which the
    first exceeds the second, ties counting half, and the two-sided p: Mann–Whitney's mid-p, to
    which the observed U counts half, combined over strata by Stouffer.
    """
    strata = list(zip(first, second, strict=True))
    above, below = (
        [stats.mannwhitneyu(a, b, alternative=side) for a, b in strata]
        for side in ("greater", "less")
    )
    u, pairs = sum(r.statistic for r in above), sum(len(a) * len(b) for a, b in strata)
    # Both tails, since 1 − p of a tiny p would round to 1, whose z is −∞.
    tails = np.array([(r.pvalue, s.pvalue) for r, s in zip(above, below, strict=True)])
    z = stats.norm.isf((tails.min(1) + (1 - tails.max(1))) / 2)
    z = np.where(tails[:, 0] < tails[:, 1], z, -z).sum() / math.sqrt(len(tails))
    return float(2 * u / pairs - 1), float(2 * stats.norm.sf(abs(z)))


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
    facts = {"corpus": sequences.part(uses["tokens"])}
    try:
        return Report(name, facts, {"heads": uses, "comparison": compare_groups(uses)})
    except InputError as error:
        return Report(name, facts, {"heads": uses}, {"comparison": str(error)})
