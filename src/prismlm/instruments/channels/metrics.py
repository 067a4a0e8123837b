"""How evenly gates spread over channels, what they tell of tokens, and how read follows write.

a_n is a gate at token n in one group of P channels, shares that add up to 1; means are over N
tokens. Groups are measured one by one, and each figure is the mean over them. Figures of one
position are of absolute values (ProtoT, A.8, Eq. 3 to 6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_choice, check_finite, check_whole
from prismlm.instruments.channels.top_sequences import TopSequences
from prismlm.instruments.results import Row
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, watch
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

Kind = Literal["write", "read", "values"]
STILL = 1e-28
"""The variance below which a gate counts as one that never varies."""


@dataclass(frozen=True)
class GateUse:
    """How evenly one gate spreads over the P channels of a group, the mean over its groups.

    Source: ProtoT, A.7.1 and Table 15, whose "Gini" and "top-1" it does not define further.

    Attributes:
        gini: mean_n G(a_n), how unevenly single tokens spread, G as in A.8, Eq. 4; 0 to 1 − 1/P.
        use_gini: G(mean_n a_n), how unevenly channels are used by all tokens together, whatever
            single tokens do; 0 to 1 − 1/P.
        top_share: mean_n max_k a_nk, what a token gives to its first channel; 1/P to 1.
        top_channel_share: max_k mean_n a_nk, what the most used channel gets; 1/P to 1.
    """

    gini: float
    use_gini: float
    top_share: float
    top_channel_share: float


@dataclass(frozen=True)
class LayerUse:
    """Both gates of a layer; with shared gates they are the same.

    Attributes:
        tokens: N.
        write: the write gate.
        read: the read gate.
    """

    tokens: int
    write: GateUse
    read: GateUse


class UseTally:
    """What one gate's figures are computed from, batch by batch.

    Args:
        groups: equal parts of the channels whose figures are taken one by one.
    """

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups
        self.tokens = 0
        self._gini = 0.0
        self._top = 0.0
        self._use: Tensor | None = None

    def add(self, gate: Float[Tensor, "N R"]) -> None:
        """Take N tokens.

        Raises:
            InputError: a gate that is not finite, or a token that gives a group nothing.
        """
        found = gate.detach().double().unflatten(-1, (self.groups, -1))
        self.tokens += len(found)
        self._gini += gini(found).mean(-1).sum().item()
        self._top += found.amax(-1).mean(-1).sum().item()
        use = found.sum(0).cpu()
        self._use = use if self._use is None else self._use + use

    def result(self) -> GateUse:
        """Return the figures so far.

        Raises:
            InputError: no tokens have come.
        """
        if self._use is None or not self.tokens:
            raise InputError("no tokens were read, so there are no gates to measure.")
        use = self._use / self.tokens
        return GateUse(
            self._gini / self.tokens,
            gini(use).mean().item(),
            self._top / self.tokens,
            use.amax(-1).mean().item(),
        )


def gate_uses(model: nn.Module, batches: Iterable[WindowBatch]) -> tuple[LayerUse, ...]:
    """Return how evenly each layer's gates spread, from one forward pass a batch, without logits.

    Tokens count that their window owns. Passes are in evaluation mode.

    Raises:
        InputError: the model has no prototype mixer, or there is no text.
    """
    tallies = [(UseTally(mixer.groups), UseTally(mixer.groups)) for mixer in mixers_of(model)]
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            owned = batch.owned.to(device)
            layers = gates_of(model, batch.input_ids, batch.attention_mask)
            for (write, read), evidence in zip(tallies, layers, strict=True):
                write.add(evidence.write[owned])
                read.add(evidence.read[owned])
    return tuple(LayerUse(write.tokens, write.result(), read.result()) for write, read in tallies)


def sparsity_ratio(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return max_p |a_p| / mean_p |a_p|: 1 if all are equal, P if there is one alone; float64.

    The source calls its mean over positions the L1 sparsity ratio.

    Raises:
        InputError: activations that are not finite, or a position where all are zero.
    """
    a = _magnitudes(activations)
    return a.amax(-1) / a.mean(-1)


def gini(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return the Gini coefficient: 0 if all are equal, 1 − 1/P if there is one alone; float64.

        G = (P + 1 − 2 Σ_p (P + 1 − p) a↑_p / Σ_p a_p) / P,   a↑ ascending, p from 1

    Raises:
        InputError: as :func:`sparsity_ratio`.
    """
    a = _magnitudes(activations).sort(-1).values
    count = a.shape[-1]
    weights = torch.arange(count, 0, -1, dtype=a.dtype, device=a.device)
    return (count + 1 - 2 * (a * weights).sum(-1) / a.sum(-1)) / count


def entropy(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return −Σ_p q_p ln q_p with q = |a| / Σ |a|, in nats: ln P if all are equal; float64.

    Raises:
        InputError: as :func:`sparsity_ratio`.
    """
    a = _magnitudes(activations)
    shares = a / a.sum(-1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(-1)


def _magnitudes(activations: Tensor) -> Tensor:
    magnitudes = activations.detach().double().abs()
    check_finite("activations", magnitudes)
    if magnitudes.shape[-1] == 0 or not bool((magnitudes.sum(-1) > 0).all()):
        raise InputError(
            "a position has no activation at all, so it has no distribution over channels: leave "
            "padding out, and do not mask every channel."
        )
    return magnitudes


@torch.no_grad()
def value_norms(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[Float[Tensor, "B T H"], ...]:
    """Return ‖v_h‖ of each layer's value heads, before attention mixes positions; float32.

    Heads that share keys and values count once. Only this thread's pass counts.

    Source: ProtoT, A.8: "attention heads value norms".

    Raises:
        InputError: the model has no layer with ``self_attn.v_proj``, as LLaMA's have.
    """
    projections = _value_projections(model)
    found: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        heads = output.detach().float().unflatten(-1, (-1, projections[module]))
        found[module] = heads.norm(dim=-1)

    with watch(Hook(module, after=note) for module in projections):
        run_decoder(model, input_ids, mask)
    return tuple(found[module] for module in projections)


def activations(
    model: PreTrainedModel, batch: WindowBatch, kind: Kind = "write"
) -> tuple[Float[Tensor, "N P"], ...]:
    """Return write gates, read gates or value norms of each layer at a batch's N owned positions.

    They are float32 and on the CPU.

    Raises:
        InputError: an unknown kind, or one that the model does not have.
    """
    check_choice("the kind of activations", kind, get_args(Kind))
    ids, mask = batch.input_ids, batch.attention_mask
    if kind == "values":
        layers = value_norms(model, ids, mask)
    else:
        layers = tuple(getattr(evidence, kind) for evidence in gates_of(model, ids, mask))
    owned = batch.owned.to(model.device)
    return tuple(a[owned].float().cpu() for a in layers)


def _value_projections(model: nn.Module) -> dict[nn.Module, int]:
    """Return each layer's value projection with the width of a head."""
    found: dict[nn.Module, int] = {}
    for name, module in model.named_modules():
        projection, width = getattr(module, "v_proj", None), getattr(module, "head_dim", None)
        if name.endswith("self_attn") and isinstance(projection, nn.Module) and width:
            found[projection] = int(width)
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no value projections self_attn.v_proj: value norms are "
            "read from models built as LLaMA is."
        )
    return found


class LayerTally:
    """What one layer's figures are computed from, batch by batch.

    Until ``sample`` positions have come they are kept, to lay the bins by; afterwards counts and
    sums are all that is kept.

    Args:
        vocabulary: V.
        bins: of each channel's activation.
        sample: positions that the bins are laid by.
        groups: equal parts of the channels whose figures are taken one by one.

    Raises:
        InputError: fewer than two bins, or no positions to lay them by.
    """

    def __init__(self, vocabulary: int, bins: int = 8, sample: int = 8192, groups: int = 1) -> None:
        check_whole("the number of bins", bins, 2)
        check_whole("the number of positions that bins are laid by", sample, 1)
        self.vocabulary, self.bins, self.sample, self.groups = vocabulary, bins, sample, groups
        self.positions = 0
        self.width = 0
        self._sums = torch.zeros(3, dtype=torch.float64)
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._counts: TokenCounts | None = None

    def add(self, tokens: Tensor, found: Tensor) -> None:
        """Take N positions: tokens int64 [N], activations [N, P].

        Raises:
            InputError: activations without a distribution, or a token beyond the vocabulary.
        """
        parts = found.unflatten(-1, (self.groups, -1))
        figures = (f(parts).mean(-1).sum() for f in (sparsity_ratio, gini, entropy))
        self._sums += torch.stack(list(figures))
        self.positions += len(tokens)
        self.width = found.shape[-1] // self.groups
        if self._counts is not None:
            self._counts.add(tokens, found.abs())
            return
        self._waiting.append((tokens, found.abs()))
        if self.positions >= self.sample:
            self._counts = self._count()

    def metrics(self, layer: int) -> Row:
        """Return the figures so far, as of :func:`measure_layers`."""
        if self._counts is None:
            self._counts = self._count()
        ratio, inequality, spread = (self._sums / self.positions).tolist()
        return {
            "layer": layer,
            "width": self.width,
            "positions": self.positions,
            "sparsity_ratio": ratio,
            "gini": inequality,
            "entropy": spread,
            "entropy_share": spread / math.log(self.width) if self.width > 1 else math.nan,
            "mutual_information": self._counts.information().mean().item(),
            "mutual_information_corrected": self._counts.information(corrected=True).mean().item(),
        }

    def _count(self) -> TokenCounts:
        edges = equal_bins(torch.cat([found for _, found in self._waiting]), self.bins)
        counts = TokenCounts.empty(edges, self.vocabulary)
        for tokens, found in self._waiting:
            counts.add(tokens, found)
        self._waiting = []
        return counts


def measure_layers(
    model: PreTrainedModel,
    sequences: Sequences,
    kind: Kind = "write",
    *,
    bins: int = 8,
    sample: int = 8192,
    progress: Reporter = SILENT,
) -> tuple[Row, ...]:
    """Return sparsity ratio, Gini, entropy and mutual information of every layer.

    Memory: 8·V·P·bins bytes for each layer, and ``sample`` positions' activations.

    Source: ProtoT, A.8, for the write gates of ProtoT and the value norms of LLaMA's heads.

    Returns:
        A row for each ``layer``: ``width`` P, how many channels (of a group) or heads there are;
        ``positions`` read; ``sparsity_ratio``, max over mean, 1 to P; ``gini``, 0 to 1 − 1/P;
        ``entropy``, nats, and ``entropy_share``, of ln P, what it is if all are equal, NaN where
        there is one alone; ``mutual_information`` with the token read, nats, too high from few
        positions, and ``mutual_information_corrected`` after Miller and Madow. Means over
        positions, and for the information over channels.

    Raises:
        InputError: activations that the model does not have, or no text.
    """
    tallies: list[LayerTally] = []
    with progress.task("Measuring layers", sequences.tokens) as task:
        for batch in sequences.batches():
            tokens, layers = batch.input_ids[batch.owned], activations(model, batch, kind)
            if not tallies:
                # The heads of attention are one group.
                groups = (
                    [1] * len(layers) if kind == "values" else [m.groups for m in mixers_of(model)]
                )
                tallies = [LayerTally(model.config.vocab_size, bins, sample, g) for g in groups]
            for tally, layer in zip(tallies, layers, strict=True):
                tally.add(tokens, layer)
            task.advance(len(tokens))
    return tuple(tally.metrics(layer) for layer, tally in enumerate(tallies))


def equal_bins(sample: Float[Tensor, "N P"], bins: int) -> Float[Tensor, "P bins-1"]:
    """Return the edges between bins that hold equally many of each channel's activations."""
    ordered = sample.double().sort(0).values
    # The last activation of each bin but the last: an edge belongs to the bin below it.
    places = (torch.arange(1, bins) * len(sample) / bins).ceil().long() - 1
    return ordered[places].T.contiguous()


@dataclass(frozen=True)
class TokenCounts:
    """How often each token came with each bin of each channel: counts that batches add up to.

        I(T; ã_p) = Σ_{t,b} P(t, b) ln( P(t, b) / (P(t) P(b)) ),   in nats

    ã_p is the number of the bin that channel p's activation falls into. The source leaves the bins
    open; here each channel has bins that hold equally many activations of a sample. From few
    positions the plain figure is too high, since a rare token is seen with few bins whatever it
    does: the Miller–Madow correction takes off what chance gives, and can come out below zero.
    Where each token always has one bin there is no such excess, and it adds the little that the
    entropy of the bins is too low by. Memory: 8·V·P·bins bytes.

    Source: ProtoT, A.8, Eq. 6.

    Attributes:
        edges: between bins, ascending, [P, bins − 1].
        counts: int64 [V, P, bins].
    """

    edges: Float[Tensor, "P bins-1"]
    counts: Int64[Tensor, "V P bins"]

    @classmethod
    def empty(cls, edges: Float[Tensor, "P bins-1"], vocabulary: int) -> TokenCounts:
        """Return counts of nothing."""
        channels, inner = edges.shape
        counts = torch.zeros(vocabulary, channels, inner + 1, dtype=torch.int64)
        return cls(edges.double().contiguous(), counts)

    def add(self, tokens: Int64[Tensor, " N"], activations: Float[Tensor, "N P"]) -> None:
        """Count N positions.

        Raises:
            InputError: a token beyond the vocabulary.
        """
        vocabulary, channels, bins = self.counts.shape
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise InputError(f"a token is not one of the {vocabulary} counted: give all tokens.")
        values = activations.double().T.contiguous()
        found = torch.searchsorted(self.edges, values).T
        cells = (tokens[:, None] * channels + torch.arange(channels)) * bins + found
        self.counts.view(-1).index_add_(
            0, cells.flatten(), torch.ones(cells.numel(), dtype=torch.int64)
        )

    def information(self, *, corrected: bool = False) -> Float[Tensor, " P"]:
        """Return I(T; ã_p) of each channel, in nats; float64.

        corrected:  I + (K_T + K_B − K_TB − 1) / 2n,   K: how many values or pairs were seen
        """
        total = self.counts[:, 0].sum().item()
        pairs, tokens, bins = self.counts, self.counts.sum(2), self.counts.sum(0)
        information = _entropy(tokens, 0) + _entropy(bins, 1) - _entropy(pairs, (0, 2))
        if corrected:
            seen = (tokens > 0).sum(0) + (bins > 0).sum(1) - (pairs > 0).sum((0, 2)) - 1
            information = information + seen / (2 * total)
        return information


def _entropy(counts: Tensor, over: int | tuple[int, ...]) -> Tensor:
    shares = counts.double() / counts.sum(over, keepdim=True)
    return -torch.xlogy(shares, shares).sum(over)


def repetition(best: TopSequences) -> Float[Tensor, " R"]:
    """Return 1 − distinct / all over each channel's kept tokens: 0 if none comes twice; float64.

    The source takes how often the most writing tokens repeat as a stand-in for locality, without
    saying how it counts. Source: ProtoT, A.8, Table 21.

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


def quartiles(half_life: Float[Tensor, " n"], scores: Float[Tensor, " n"]) -> Row:
    """Compare repetition over quartiles of half-life, the shortest first.

    Returns:
        ``bounds``, half-lives between the groups, a channel at a bound in the shorter one;
        ``counts`` of channels; ``means`` of repetition, NaN of an empty group; and ``cohens_d``,
        (mean of the first − mean of the last) / pooled standard deviation.

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
    return {
        "bounds": bounds.tolist(),
        "counts": [len(part) for part in parts],
        "means": [float(part.mean()) if len(part) else math.nan for part in parts],
        "cohens_d": float(first.mean() - last.mean()) / pooled,
    }


@dataclass(frozen=True, eq=False)
class LagCorrelation:
    """Cross-correlation of read and write of R channels; NaN where a gate never varies.

        c(ℓ) = Σ_i r_i w_{i+ℓ} / √(Σ_i r_i² · Σ_i w_i²),   gates minus their mean over the sequence

    A peak at ℓ = 1 means that the channel is read one position before it is written. Sums run over
    all sequences. Against it stands the same with the read gate's positions shuffled within each
    sequence, which also takes away that neighbouring gates are alike: a small p says that read and
    write hang together at some lag, and the peak which.
    Source: ProtoT, §5.1, which shows the pattern by example and has no figure for it.

    Attributes:
        lags: −L to L.
        correlation: c(ℓ), float64.
        null_mean: of the shuffled, float64.
        null_deviation: their standard deviation, float64.
        peak: the lag of the largest c(ℓ).
        p: the share of shuffles whose largest c(ℓ) is at least that large, the unshuffled
            counted among them.
    """

    lags: Int64[Tensor, " lags"]
    correlation: Float[Tensor, "R lags"]
    null_mean: Float[Tensor, "R lags"]
    null_deviation: Float[Tensor, "R lags"]
    peak: Int64[Tensor, " R"]
    p: Float[Tensor, " R"]


class LagTally:
    """Sums of the cross-correlation, sequence by sequence.

    With shared gates, which are read by the write gate, the correlation is 1 at lag 0.

    Args:
        channels: R.
        max_lag: L.
        shuffles: of each sequence.
        seed: of the shuffles.

    Raises:
        InputError: a lag below 1, or fewer than two shuffles.
    """

    def __init__(self, channels: int, max_lag: int = 4, shuffles: int = 99, seed: int = 0) -> None:
        check_whole("the largest lag", max_lag, 1)
        check_whole("the number of shuffles", shuffles, 2)
        self.max_lag = max_lag
        self._generator = torch.Generator().manual_seed(seed)
        # The first is the order as it is.
        self._products = torch.zeros(shuffles + 1, channels, 2 * max_lag + 1, dtype=torch.float64)
        self._energy = torch.zeros(2, channels, dtype=torch.float64)
        self._positions = 0

    def add(self, write: Float[Tensor, "T R"], read: Float[Tensor, "T R"]) -> None:
        """Take one sequence."""
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
        # What is below that is the rounding of the means.
        varies = scale > STILL * self._positions
        found = self._products / torch.where(varies, scale, torch.nan)[None, :, None]
        observed, null = found[0], found[1:]
        at_least = (null.amax(2) >= observed.amax(1)).sum(0)
        lags = torch.arange(-self.max_lag, self.max_lag + 1)
        return LagCorrelation(
            lags,
            observed,
            null.mean(0),
            null.std(0),
            lags[observed.argmax(1)],
            torch.where(varies, (at_least.double() + 1) / len(found), torch.nan),
        )
