"""The sequences that write most into each channel, with the tokens that do so.

Sequences rank by what they write in all, Σ_j write_jk, and among equals by position in the corpus:
a total order, so that parts merge to the same result in any order. Memory is set by channels times
kept sequences.
Source: ProtoT, §5.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.words import WordedText, worded
from prismlm.errors import check_finite, check_whole
from prismlm.models.decoders.mixers import check_channel, chosen_layers, gates_of, mixers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch


class TopSequences(NamedTuple):
    """The best sequences of one layer's channels, R × L, best first; start −1 marks a free place.

    Attributes:
        total: Σ_j write_jk.
        start: the corpus position of the sequence's first token.
        length: its tokens.
        document: the number of its document.
        position: corpus positions of its W most writing tokens, most first; −1 beyond its length.
        gate: their write gates.
        token: their ids.
    """

    total: Float32[Tensor, "R L"]
    start: Int64[Tensor, "R L"]
    length: Int64[Tensor, "R L"]
    document: Int64[Tensor, "R L"]
    position: Int64[Tensor, "R L W"]
    gate: Float32[Tensor, "R L W"]
    token: Int64[Tensor, "R L W"]


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


def empty_ranking(channels: int, sequences: int, tokens: int) -> TopSequences:
    """Return places for ``sequences`` with ``tokens`` each, for every channel.

    Raises:
        InputError: no sequence or no token is to be kept.
    """
    check_whole("the number of sequences kept", sequences, 1)
    check_whole("the number of tokens kept of a sequence", tokens, 1)
    places, inner = (channels, sequences), (channels, sequences, tokens)
    return TopSequences(
        total=torch.full(places, -torch.inf),
        start=torch.full(places, -1, dtype=torch.int64),
        length=torch.full(places, -1, dtype=torch.int64),
        document=torch.full(places, -1, dtype=torch.int64),
        position=torch.full(inner, -1, dtype=torch.int64),
        gate=torch.zeros(inner),
        token=torch.full(inner, -1, dtype=torch.int64),
    )


def merge_rankings(left: TopSequences, right: TopSequences) -> TopSequences:
    """Return the best of both, in as many places as ``left`` has; associative and commutative."""
    both = TopSequences(*(torch.cat(columns, 1) for columns in zip(left, right, strict=True)))
    by_start = both.start.argsort(1)
    rank = torch.gather(both.total, 1, by_start).argsort(dim=1, descending=True, stable=True)
    kept = torch.gather(by_start, 1, rank)[:, : left.total.shape[1]]
    rows = torch.arange(len(kept))[:, None]
    return TopSequences(*(column[rows, kept] for column in both))


def candidates(write: Float32[Tensor, "B T R"], batch: WindowBatch, tokens: int) -> TopSequences:
    """Return a batch's sequences as a ranking of B places, unordered, for :func:`merge_rankings`.

    Raises:
        InputError: a gate is not finite.
    """
    owned = batch.owned[:, :, None]
    check_finite("gates", write)
    total = torch.where(owned, write, 0.0).sum(1).T
    # Sorted, not topk: among equal gates the earlier token comes first.
    masked = torch.where(owned, write, -torch.inf)
    gate, place = masked.sort(dim=1, descending=True, stable=True)
    gate, place = (x[:, :tokens].permute(2, 0, 1) for x in (gate, place))
    row = torch.arange(len(batch.owned))[:, None]
    free = torch.isinf(gate)
    inner = [
        torch.where(free, -1, batch.positions[row, place]),
        torch.where(free, 0.0, gate),
        torch.where(free, -1, batch.input_ids[row, place]),
    ]
    missing = tokens - gate.shape[2]
    if missing > 0:
        inner = [
            torch.nn.functional.pad(x, (0, missing), value=value)
            for x, value in zip(inner, (-1, 0, -1), strict=True)
        ]
    length, first = batch.owned.sum(1), batch.owned.int().argmax(1)
    start = batch.positions.gather(1, first[:, None])[:, 0]
    columns = (x.expand(len(total), -1) for x in (start, length, batch.document))
    return TopSequences(total, *columns, *inner)


def rank_sequences(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    kept: int = 10,
    tokens: int = 10,
    layers: Sequence[int] | None = None,
) -> dict[int, TopSequences]:
    """Return the ``kept`` sequences that write most into each channel, by layer.

    Raises:
        InputError: no prototype mixer, an unknown layer, nothing to keep, or no text.
    """
    chosen = chosen_layers(len(mixers_of(model)), layers)

    def write_gates(batch: WindowBatch) -> dict[int, Tensor]:
        by_layer = gates_of(model, batch.input_ids, batch.attention_mask)
        return {layer: by_layer[layer].write for layer in chosen}

    return rank_activations(sequences, write_gates, kept=kept, tokens=tokens)


def rank_activations(
    sequences: Sequences,
    read: Callable[[WindowBatch], Mapping[int, Float[Tensor, "B T R"]]],
    *,
    kept: int = 10,
    tokens: int = 10,
) -> dict[int, TopSequences]:
    """Return the ``kept`` sequences with the largest Σ_j a_jk of each of R units, by layer.

    Args:
        sequences: the text.
        read: gives the activations a of each layer along a batch.
        kept: sequences of each unit.
        tokens: of each sequence, those with the largest a.

    Raises:
        InputError: nothing to keep, no text, or an activation that is not finite.
    """
    best: dict[int, TopSequences] = {}
    for batch in sequences.batches():
        for layer, found in read(batch).items():
            if layer not in best:
                best[layer] = empty_ranking(found.shape[2], kept, tokens)
            own = candidates(found.float().cpu(), batch, tokens)
            best[layer] = merge_rankings(best[layer], own)
    return best


def sequences_of(best: TopSequences, channel: int, layer: int = 0) -> tuple[ChannelSequence, ...]:
    """Return one channel's sequences, best first; ``layer`` is for messages.

    Raises:
        InputError: there is no such channel.
    """
    check_channel(len(best.total), layer, channel)
    columns = (column[channel].tolist() for column in best)
    return tuple(
        ChannelSequence(
            total,
            start,
            length,
            document,
            tuple(
                ChannelToken(p, t, g)
                for p, g, t in zip(position, gate, token, strict=True)
                if p >= 0
            ),
        )
        for total, start, length, document, position, gate, token in zip(*columns, strict=True)
        if start >= 0
    )


@dataclass(frozen=True)
class PassageOrigin:
    """Where a passage is from; None is what the corpus does not know."""

    doc_id: str
    title: str | None
    source: str | None
    domain: str | None
    license: str | None
    url: str | None


@dataclass(frozen=True)
class Passage:
    """A sequence of a corpus with its text.

    Attributes:
        start: corpus position of its first token.
        offset: of its first token in its document.
        document: that document.
        text: its words and tokens.
    """

    start: int
    offset: int
    document: PassageOrigin
    text: WordedText


def read_passages(corpus: Corpus, sequences: Iterable[ChannelSequence]) -> dict[int, Passage]:
    """Return each sequence's passage, by corpus position of its first token.

    Each document is read and encoded once.

    Raises:
        FormatError: the corpus is damaged, or its tokenizer no longer gives its tokens.
    """
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
        document = PassageOrigin(**{name: row[name] for name in PassageOrigin.__dataclass_fields__})
        for start, length in sorted(wanted[number]):
            offset = start - row["start"]
            words = worded(text, spans[offset : offset + length])
            found[start] = Passage(start, offset, document, words)
    return found
