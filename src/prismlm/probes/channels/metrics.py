"""How evenly gates spread over channels, what they say of tokens, and how read follows write.

a_n is a gate at token n in one group of P channels; means are over N tokens. Each group is measured
by itself, and a figure is the mean over groups. Figures of one position take absolute values
(ProtoT, A.8, Eq. 3 to 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_choice, check_finite, check_whole
from prismlm.layers import MixerEvidence
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, watch
from prismlm.probes.reading import gates_along
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

Kind = Literal["write", "read", "values"]
STILL = 1e-28
"""The variance below which a gate counts as constant."""


def sparsity_ratio(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return max_p |a_p| / mean_p |a_p|, float64: 1 if all are equal, P if one is alone."""
    a = _magnitudes(activations)
    return a.amax(-1) / a.mean(-1)


def gini(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return the Gini coefficient, float64: 0 if all are equal, 1 − 1/P if one is alone.

    G = (P + 1 − 2 Σ_p (P + 1 − p) a↑_p / Σ_p a_p) / P,   a↑ ascending, p from 1
    """
    a = _magnitudes(activations).sort(-1).values
    count = a.shape[-1]
    weights = torch.arange(count, 0, -1, dtype=a.dtype, device=a.device)
    return (count + 1 - 2 * (a * weights).sum(-1) / a.sum(-1)) / count


def entropy(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return −Σ_p q_p ln q_p with q = |a| / Σ |a|, in nats, float64: ln P if all are equal."""
    a = _magnitudes(activations)
    return torch.special.entr(a / a.sum(-1, keepdim=True)).sum(-1)


def _magnitudes(activations: Tensor) -> Tensor:
    magnitudes = activations.detach().double().abs()
    check_finite("activations", magnitudes)
    if not bool((magnitudes.sum(-1) > 0).all()):
        raise InputError(
            "a position has no activation at all, so it has no distribution over channels: leave "
            "padding out, and do not mask every channel."
        )
    return magnitudes


@dataclass(frozen=True)
class GateUse:
    """How evenly one gate spreads over the P channels of a group (ProtoT, A.7.1 and Table 15).

    Attributes:
        gini: mean_n G(a_n), of single tokens; 0 to 1 − 1/P.
        use_gini: G(mean_n a_n), of all tokens together; 0 to 1 − 1/P.
        top_share: mean_n max_k a_nk, what a token gives its first channel; 1/P to 1.
        top_channel_share: max_k mean_n a_nk, what the most used channel gets; 1/P to 1.
    """

    gini: float
    use_gini: float
    top_share: float
    top_channel_share: float


class LayerUse(NamedTuple):
    """Both gates of a layer over ``tokens`` tokens; with shared gates they are the same."""

    tokens: int
    write: GateUse
    read: GateUse


def gate_use(gate: Float[Tensor, "N R"], groups: int = 1) -> GateUse:
    """Return how evenly a gate spreads over N tokens; groups are equal parts of the channels."""
    parts = gate.double().unflatten(-1, (groups, -1))
    use = parts.mean(0)
    figures = gini(parts), gini(use), parts.amax(-1), use.amax(-1)
    return GateUse(*(figure.mean().item() for figure in figures))


def gate_uses(model: nn.Module, batches: Iterable[WindowBatch]) -> tuple[LayerUse, ...]:
    """Return how evenly each layer's gates spread over the tokens that windows own."""
    mixers = mixers_of(model)
    gates: list[list[MixerEvidence]] = [[] for _ in mixers]
    for batch, read in gates_along(model, batches):  # pyright: ignore[reportArgumentType]
        for layer, kept in enumerate(gates):
            kept.append(MixerEvidence(*(gate[batch.owned] for gate in read[layer])))
    uses: list[LayerUse] = []
    for mixer, kept in zip(mixers, gates, strict=True):
        write, read = (torch.cat(column) for column in zip(*kept, strict=True))
        groups = mixer.groups
        uses.append(LayerUse(len(write), gate_use(write, groups), gate_use(read, groups)))
    return tuple(uses)


@torch.no_grad()
def value_norms(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖v_h‖ of each layer's value heads before attention mixes positions; float32.

    Heads that share keys and values count once (ProtoT, A.8).
    """
    widths: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        projection, width = getattr(module, "v_proj", None), getattr(module, "head_dim", None)
        if name.endswith("self_attn") and isinstance(projection, nn.Module) and width:
            widths[projection] = int(width)
    if not widths:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no value projections self_attn.v_proj: value norms are "
            "read from models built as LLaMA is."
        )
    norms: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        norms[module] = output.detach().float().unflatten(-1, (-1, widths[module])).norm(dim=-1)

    with watch(Hook(module, after=note) for module in widths):
        run_decoder(model, input_ids, mask)
    return tuple(norms[module] for module in widths)


class LayerTally:
    """Sums behind one layer's figures, over batches; see :func:`measure_layers`.

    The first ``sample`` positions are kept and determine the ``bins`` of each channel's activation,
    which hold equally many of them; afterwards only counts of token and bin are. The source leaves
    the bins open.
    """

    def __init__(self, vocabulary: int, bins: int = 8, sample: int = 8192, groups: int = 1) -> None:
        self.vocabulary, self.bins, self.sample, self.groups = vocabulary, bins, sample, groups
        self.positions = self.width = 0
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._edges = self._counts = torch.empty(0)

    def add(self, tokens: Int64[Tensor, " N"], activations: Float[Tensor, "N P"]) -> None:
        """Add N positions."""
        parts = activations.unflatten(-1, (self.groups, -1))
        figures = [f(parts).mean(-1).sum() for f in (sparsity_ratio, gini, entropy)]
        self._sums += torch.stack(figures)
        self.positions += len(tokens)
        self.width = parts.shape[-1]
        self._waiting.append((tokens, activations.abs()))
        if len(self._edges) or self.positions >= self.sample:
            self._count()

    def _count(self) -> None:
        if not len(self._edges):
            self._edges = equal_bins(torch.cat([found for _, found in self._waiting]), self.bins)
            shape = (self.vocabulary, len(self._edges), self.bins)
            self._counts = torch.zeros(shape, dtype=torch.int64)
        for tokens, activations in self._waiting:
            count_bins(self._counts, self._edges, tokens, activations)
        self._waiting = []

    def metrics(self, layer: int) -> Row:
        """Return the figures so far."""
        self._count()
        ratio, inequality, spread = (self._sums / self.positions).tolist()
        return {
            "layer": layer,
            "width": self.width,
            "positions": self.positions,
            "sparsity_ratio": ratio,
            "gini": inequality,
            "entropy": spread,
            "entropy_share": spread / math.log(self.width) if self.width > 1 else math.nan,
            "mutual_information": information(self._counts).mean().item(),
            "mutual_information_corrected": information(self._counts, True).mean().item(),
        }


def measure_layers(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Kind = "write",
    *,
    bins: int = 8,
    sample: int = 8192,
    progress: Reporter = SILENT,
) -> tuple[Row, ...]:
    """Return sparsity, Gini, entropy and mutual information of every layer (ProtoT, A.8).

    Memory: 8·V·P·bins bytes a layer, and the activations of ``sample`` positions.

    Returns:
        A row for each ``layer``: its ``width`` P; ``positions`` read; ``sparsity_ratio``, max over
        mean; ``gini``; ``entropy`` in nats and ``entropy_share`` of ln P, NaN for P = 1;
        ``mutual_information`` with the token read, nats, biased upwards by few positions, and
        ``mutual_information_corrected`` after Miller and Madow, the means over channels.
    """
    check_choice("the kind of activations", kind, get_args(Kind))
    tallies: list[LayerTally] = []
    with progress.task("Measuring layers", sequences.tokens) as task:
        for batch in sequences.batches():
            ids, mask = batch.input_ids, batch.attention_mask
            if kind == "values":
                layers = value_norms(model, ids, mask)
            else:
                layers = tuple(getattr(evidence, kind) for evidence in gates_of(model, ids, mask))
            if not tallies:
                # The heads of attention are one group.
                groups = [1] * len(layers)
                groups = groups if kind == "values" else [m.groups for m in mixers_of(model)]
                tallies = [LayerTally(model.config.vocab_size, bins, sample, g) for g in groups]
            owned = batch.owned.to(model.device)
            for tally, layer in zip(tallies, layers, strict=True):
                tally.add(ids[batch.owned], layer[owned].float().cpu())
            task.advance(int(batch.owned.sum()))
    return tuple(tally.metrics(layer) for layer, tally in enumerate(tallies))


def equal_bins(sample: Float[Tensor, "N P"], bins: int) -> Float[Tensor, "P bins-1"]:
    """Return the edges between bins that hold equally many of each channel's activations."""
    # An edge is the last activation of the bin below it, and belongs to that bin.
    places = (torch.arange(1, bins) * len(sample) / bins).ceil().long() - 1
    return sample.double().sort(0).values[places].T.contiguous()


def count_bins(
    counts: Int64[Tensor, "V P bins"],
    edges: Float[Tensor, "P bins-1"],
    tokens: Int64[Tensor, " N"],
    activations: Float[Tensor, "N P"],
) -> None:
    """Add to ``counts`` how often each token came with each bin of each channel."""
    _, channels, bins = counts.shape
    found = torch.searchsorted(edges, activations.double().T.contiguous()).T
    cells = ((tokens[:, None] * channels + torch.arange(channels)) * bins + found).flatten()
    counts.view(-1).index_add_(0, cells, torch.ones_like(cells))


def information(counts: Int64[Tensor, "V P bins"], corrected: bool = False) -> Float[Tensor, " P"]:
    """Return I(T; ã_p) = H(T) + H(ã_p) − H(T, ã_p) of each channel, nats; float64.

    ã_p is the bin of channel p's activation (ProtoT, A.8, Eq. 6). From few positions this is too
    high, which the Miller–Madow correction takes off; it can fall below zero:

        corrected:  I + (K_T + K_B − K_TB − 1) / 2n,   K: how many values or pairs were seen
    """
    tokens, bins = counts.sum(2), counts.sum(0)
    found = _entropy(tokens, 0) + _entropy(bins, 1) - _entropy(counts, (0, 2))
    if corrected:
        seen = (tokens > 0).sum(0) + (bins > 0).sum(1) - (counts > 0).sum((0, 2)) - 1
        found = found + seen / (2 * tokens[:, 0].sum().item())
    return found


def _entropy(counts: Tensor, over: int | tuple[int, ...]) -> Tensor:
    return torch.special.entr(counts.double() / counts.sum(over, keepdim=True)).sum(over)


def repetition(tokens: Int64[Tensor, "R L W"]) -> Float[Tensor, " R"]:
    """Return 1 − distinct / all over each channel's kept tokens (−1: none); float64.

    0 if no token comes twice. The source takes how often the most written tokens repeat as a proxy
    for locality, without saying how it counts (ProtoT, A.8, Table 21).
    """
    kept = [row[row >= 0] for row in tokens.flatten(1)]
    scores = [1 - row.unique().numel() / row.numel() for row in kept]
    return torch.tensor(scores, dtype=torch.float64)


def quartiles(half_life: Float[Tensor, " n"], scores: Float[Tensor, " n"]) -> Row:
    """Compare repetition over quartiles of half-life, the shortest first.

    Returns:
        ``bounds`` between the groups, a channel at a bound in the shorter one; ``counts`` of
        channels; ``means`` of repetition, NaN of an empty group; and ``cohens_d``,
        (mean of the first − mean of the last) / pooled standard deviation.
    """
    lives, values = half_life.double().numpy(force=True), scores.double().numpy(force=True)
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
    return {
        "bounds": bounds.tolist(),
        "counts": [len(part) for part in parts],
        "means": [float(part.mean()) if len(part) else math.nan for part in parts],
        "cohens_d": float(first.mean() - last.mean()) / pooled,
    }


@dataclass(frozen=True, eq=False)
class LagCorrelation:
    """Cross-correlation of read and write of R channels; NaN where a gate is constant.

        c(ℓ) = Σ_i r_i w_{i+ℓ} / √(Σ_i r_i² · Σ_i w_i²),   gates minus their mean over the sequence

    A peak at ℓ = 1 means that the channel is read one position before it is written. The null
    shuffles the read gate's positions within each sequence, which also destroys the similarity of
    neighbouring gates: a small p says that read and write correlate at some lag, the peak which.
    Source: ProtoT, §5.1, which shows the pattern by example and has no figure for it.

    Attributes:
        lags: −L to L.
        correlation: c(ℓ), float64, summed over all sequences.
        null_mean, null_deviation: of the shuffles, float64.
        peak: the lag of the largest c(ℓ).
        p: share of the shuffles and the original whose largest c(ℓ) is at least that large.
    """

    lags: Int64[Tensor, " lags"]
    correlation: Float[Tensor, "R lags"]
    null_mean: Float[Tensor, "R lags"]
    null_deviation: Float[Tensor, "R lags"]
    peak: Int64[Tensor, " R"]
    p: Float[Tensor, " R"]


class LagTally:
    """Sums of the cross-correlation, sequence by sequence, with ``shuffles`` of each."""

    def __init__(self, channels: int, max_lag: int = 4, shuffles: int = 99, seed: int = 0) -> None:
        self.max_lag = check_whole("the largest lag", max_lag, 1)
        self._generator = torch.Generator().manual_seed(seed)
        # The first is the original order.
        self._products = torch.zeros(shuffles + 1, channels, 2 * max_lag + 1, dtype=torch.float64)
        self._energy = torch.zeros(2, channels, dtype=torch.float64)
        self._positions = 0

    def add(self, write: Float[Tensor, "T R"], read: Float[Tensor, "T R"]) -> None:
        """Add one sequence."""
        write, read = (gate.double() - gate.double().mean(0) for gate in (write, read))
        self._energy += torch.stack([write.square().sum(0), read.square().sum(0)])
        self._positions += len(write)
        length, shuffles = len(write), len(self._products) - 1
        orders = torch.rand(shuffles, length, generator=self._generator).argsort(1)
        orders = torch.cat([torch.arange(length)[None], orders])
        # windows[r, i] holds w_{i−L} to w_{i+L}, with zeros beyond the ends.
        padded = torch.nn.functional.pad(write.T, (self.max_lag, self.max_lag))
        windows = padded.unfold(1, 2 * self.max_lag + 1, 1)
        self._products += torch.bmm(read.T[:, orders], windows).transpose(0, 1)

    def result(self) -> LagCorrelation:
        """Return the correlations so far."""
        write, read = self._energy
        scale = (write * read).sqrt()
        # Anything below that is rounding of the means.
        varies = scale > STILL * self._positions
        found = self._products / torch.where(varies, scale, torch.nan)[None, :, None]
        observed, null = found[0], found[1:]
        at_least = (null.amax(2) >= observed.amax(1)).sum(0)
        lags = torch.arange(-self.max_lag, self.max_lag + 1)
        p = torch.where(varies, (at_least.double() + 1) / len(found), torch.nan)
        peak = lags[observed.argmax(1)]
        return LagCorrelation(lags, observed, null.mean(0), null.std(0), peak, p)
