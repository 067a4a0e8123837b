"""The four figures of a layer's activations, over as much of a corpus as is wanted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.instruments.channels.activations import BatchActivations, Kind, activations
from prismlm.instruments.channels.metrics import entropy, gini, sparsity_ratio
from prismlm.instruments.channels.mutual_information import TokenCounts, equal_bins
from prismlm.models.decoders.mixers import mixers_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        if bins < 2 or sample < 1:
            raise InputError(
                f"{bins} bins laid by {sample} positions: expected at least 2 bins and 1 position."
            )
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
        """Return the figures so far.

        Raises:
            InputError: no positions have come.
        """
        if not self.positions:
            raise InputError("no positions were read, so there is nothing to measure.")
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
            found: BatchActivations = activations(model, batch, kind)
            tallies = tallies or [
                LayerTally(model.config.vocab_size, bins, sample, groups)
                for groups in _groups(model, kind, len(found.layers))
            ]
            for tally, layer in zip(tallies, found.layers, strict=True):
                tally.add(found.tokens, layer)
            task.advance(len(found.tokens))
    return tuple(tally.metrics(layer) for layer, tally in enumerate(tallies))


def _groups(model: PreTrainedModel, kind: Kind, layers: int) -> list[int]:
    """Return into how many groups each layer's activations fall; heads of attention into one."""
    return [1] * layers if kind == "values" else [mixer.groups for mixer in mixers_of(model)]
