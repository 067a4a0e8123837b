"""The sequences of a corpus that a model is run over, and the part that was read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prismlm.corpus.windows import BlockOrder, block_passes, read_block, split_counts
from prismlm.errors import InputError, check_choice, check_whole

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch


@dataclass(frozen=True)
class CorpusPart:
    """The part of a corpus that was read: directory, name, split, length of sequences, tokens."""

    path: str
    name: str
    split: str
    length: int
    positions: int


@dataclass(frozen=True)
class Sequences:
    """Which sequences of a corpus are read: its documents, cut every ``length`` tokens.

    Blocks of documents are read in an order that lies evenly over the corpus, so that the first
    ``max_tokens`` do too. Memory is set by one block.

    Attributes:
        corpus: the text.
        split: which documents.
        length: the most tokens of a sequence; the last of a document may be shorter.
        max_tokens: after which to stop, or None for all.
    """

    corpus: Corpus
    split: Split = "heldout"
    length: int = 256
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        check_choice("the split", self.split, ("train", "heldout", "all"))
        check_whole("the length of a sequence", self.length, 1)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1)

    @property
    def tokens(self) -> int:
        """How many tokens are read; the last batch may go beyond ``max_tokens``."""
        there = split_counts(self.corpus, self.split)[1]
        return there if self.max_tokens is None else min(there, self.max_tokens)

    def part(self, positions: int) -> CorpusPart:
        """Return which part of the corpus this is, of which so many positions were read."""
        corpus = self.corpus
        return CorpusPart(str(corpus.path), corpus.name, self.split, self.length, positions)

    def batches(self) -> Iterator[WindowBatch]:
        """Yield the sequences in batches, each a function of its block alone."""
        order, read, length = BlockOrder.of(self.corpus.num_tokens), 0, self.length
        for slot in range(order.count):
            number = order.block(slot)
            block = read_block(self.corpus, order, number, self.split, length, length)
            for batch, _ in block_passes(block, self.corpus, self.corpus.eos_token_id):
                if self.max_tokens is not None and read >= self.max_tokens:
                    return
                yield batch
                read += int(batch.owned.sum())
        if not read:
            raise InputError(f"the corpus {self.corpus.name} has no documents in {self.split!r}.")
