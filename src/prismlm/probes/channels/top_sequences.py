"""The sequences that activate each unit most, such as a channel, and the tokens that do so.

Sequences rank by Σ_j a_j, of a channel Σ_j write_jk. Source: ProtoT, §5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.words import WordedText, worded
from prismlm.errors import check_finite, check_whole
from prismlm.models.decoders.mixers import check_channel
from prismlm.probes.reading import gates_along

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch


@dataclass(frozen=True)
class ChannelToken:
    """A token of a sequence, by corpus position, with its write gate."""

    position: int
    token_id: int
    gate: float


@dataclass(frozen=True)
class ChannelSequence:
    """One of the sequences that write most into a channel.

    Attributes:
        total: Σ_j write_jk.
        start: corpus position of its first token.
        length: tokens.
        document: the number of its document.
        tokens: those that write most, most first.
    """

    total: float
    start: int
    length: int
    document: int
    tokens: tuple[ChannelToken, ...]


class TopSequences:
    """The L best sequences of R units, updated batch by batch, with the W best tokens of each."""

    def __init__(self, kept: int, tokens: int) -> None:
        self.kept = check_whole("the number of sequences kept", kept, 1)
        self.width = check_whole("the number of tokens kept of a sequence", tokens, 1)
        # Σ a, start, length and document [R, L]; position, a and id of tokens [R, L, W].
        self._columns: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> Int64[Tensor, "R L W"]:
        """Ids of the tokens, −1 beyond a sequence's length."""
        return self._columns[-1]

    def add(self, activations: Float[Tensor, "B T R"], batch: WindowBatch) -> None:
        """Add the sequences of a batch."""
        check_finite("gates", activations)
        owned = batch.owned[:, :, None]
        total = torch.where(owned, activations, 0.0).sum(1).T
        # A stable sort, not topk: among equals the earlier token comes first.
        ordered = torch.where(owned, activations, -torch.inf).sort(
            dim=1, descending=True, stable=True
        )
        gate, place = (x[:, : self.width].permute(2, 0, 1) for x in ordered)
        row, free = torch.arange(len(owned))[:, None], gate.isinf()
        tokens = (
            batch.positions[row, place].masked_fill(free, -1),
            gate.masked_fill(free, 0.0),
            batch.input_ids[row, place].masked_fill(free, -1),
        )
        missing = (0, self.width - gate.shape[2])
        tokens = (F.pad(x, missing, value=v) for x, v in zip(tokens, (-1, 0, -1), strict=True))
        start = batch.positions.gather(1, batch.owned.int().argmax(1)[:, None])[:, 0]
        outer = (x.expand(len(total), -1) for x in (start, batch.owned.sum(1), batch.document))
        columns = (total, *outer, *tokens)
        if self._columns:
            columns = [torch.cat(pair, 1) for pair in zip(self._columns, columns, strict=True)]
        by_start = columns[1].argsort(1)
        rank = columns[0].gather(1, by_start).argsort(dim=1, descending=True, stable=True)
        best = by_start.gather(1, rank)[:, : self.kept]
        rows = torch.arange(len(total))[:, None]
        self._columns = tuple(column[rows, best] for column in columns)

    def __len__(self) -> int:
        """How many units there are."""
        return len(self._columns[0])

    def sequences(self, unit: int, layer: int = 0) -> tuple[ChannelSequence, ...]:
        """Return one unit's sequences, best first; ``layer`` is for messages."""
        check_channel(len(self), layer, unit)
        found: list[ChannelSequence] = []
        for total, start, length, document, position, gate, ids in zip(
            *(column[unit].tolist() for column in self._columns), strict=True
        ):
            tokens = zip(position, ids, gate, strict=True)
            kept = tuple(ChannelToken(*token) for token in tokens if token[0] >= 0)
            found.append(ChannelSequence(total, start, length, document, kept))
        # Rows that only fill a batch start nowhere.
        return tuple(sequence for sequence in found if sequence.start >= 0)


def rank_sequences(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    kept: int = 10,
    tokens: int = 10,
    layers: Sequence[int] | None = None,
) -> dict[int, TopSequences]:
    """Return the ``kept`` sequences that write most into each channel, by layer."""
    gates = gates_along(model, sequences.batches(), layers)
    read = ((batch, {i: one.write for i, one in found.items()}) for batch, found in gates)
    return _ranked(read, kept, tokens)


def rank_activations(
    sequences: Sequences,
    read: Callable[[WindowBatch], Mapping[int, Float[Tensor, "B T R"]]],
    *,
    kept: int = 10,
    tokens: int = 10,
) -> dict[int, TopSequences]:
    """Return the ``kept`` sequences of each unit by layer; ``read`` gives a batch's activations."""
    return _ranked(((batch, read(batch)) for batch in sequences.batches()), kept, tokens)


def _ranked(
    batches: Iterable[tuple[WindowBatch, Mapping[int, Tensor]]], kept: int, tokens: int
) -> dict[int, TopSequences]:
    best: dict[int, TopSequences] = {}
    for batch, layers in batches:
        for layer, activations in layers.items():
            top = best.setdefault(layer, TopSequences(kept, tokens))
            top.add(activations.float().cpu(), batch)
    return best


class PassageOrigin(NamedTuple):
    """The document of a passage; None is what the corpus does not know."""

    doc_id: str
    title: str | None
    source: str | None
    domain: str | None
    license: str | None
    url: str | None


@dataclass(frozen=True)
class Passage:
    """A sequence of a corpus, ``start`` there and ``offset`` in its document, with its text."""

    start: int
    offset: int
    document: PassageOrigin
    text: WordedText


def read_passages(corpus: Corpus, sequences: Iterable[ChannelSequence]) -> dict[int, Passage]:
    """Return each sequence's passage by its start; each document is read once."""
    wanted: dict[int, set[tuple[int, int]]] = {}
    for sequence in sequences:
        wanted.setdefault(sequence.document, set()).add((sequence.start, sequence.length))
    numbers = sorted(wanted)
    if not numbers:
        return {}
    rows = corpus.documents.take(np.array(numbers, dtype=np.int64)).to_pylist()
    found: dict[int, Passage] = {}
    for number, row, spans in zip(numbers, rows, map(corpus.spans, numbers), strict=True):
        text = corpus.text(number)
        document = PassageOrigin(*(row[name] for name in PassageOrigin._fields))
        for start, length in sorted(wanted[number]):
            offset = start - row["start"]
            words = worded(text, spans[offset : offset + length])
            found[start] = Passage(start, offset, document, words)
    return found
