"""The four figures of a layer's activations, over as much of a corpus as is wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_choice, check_whole
from prismlm.instruments.channels.gate_use import entropy, gini, sparsity_ratio
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.models.seam import run_decoder
from prismlm.models.watch import Hook, watch
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

Kind = Literal["write", "read", "values"]


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


@dataclass(frozen=True)
class LayerMetrics:
    """Figures of one layer; means over positions, and for the information over channels.

    Where channels come in groups, each group's gate is a distribution of its own over its P
    channels: the figures are means over groups too.

    Attributes:
        layer: from 0.
        width: P, how many channels (of a group) or heads there are.
        positions: how many were read.
        sparsity_ratio: max over mean, 1 to P.
        gini: 0 to 1 − 1/P.
        entropy: nats, 0 to ln P.
        mutual_information: with the token read, nats; too high from few positions.
        mutual_information_corrected: after Miller and Madow, nats.
    """

    layer: int
    width: int
    positions: int
    sparsity_ratio: float
    gini: float
    entropy: float
    mutual_information: float
    mutual_information_corrected: float

    @property
    def entropy_share(self) -> float:
        """Entropy as a share of ln P, what it is if all are equal; NaN where there is one alone."""
        return self.entropy / math.log(self.width) if self.width > 1 else math.nan


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

    def metrics(self, layer: int) -> LayerMetrics:
        """Return the figures so far."""
        if self._counts is None:
            self._counts = self._count()
        ratio, inequality, spread = (self._sums / self.positions).tolist()
        return LayerMetrics(
            layer,
            self.width,
            self.positions,
            ratio,
            inequality,
            spread,
            self._counts.information().mean().item(),
            self._counts.information(corrected=True).mean().item(),
        )

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
) -> tuple[LayerMetrics, ...]:
    """Return sparsity ratio, Gini, entropy and mutual information of every layer.

    Memory: 8·V·P·bins bytes for each layer, and ``sample`` positions' activations.

    Source: ProtoT, A.8, for the write gates of ProtoT and the value norms of LLaMA's heads.

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
