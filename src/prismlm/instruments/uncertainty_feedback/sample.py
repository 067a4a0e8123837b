"""The texts that the checks read: the starts of documents, as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from prismlm.errors import InputError, check_whole
from prismlm.instruments.forward import documents_of
from prismlm.models.positions import check_window

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.documents import Document
    from prismlm.corpus.store import Corpus, Split

LEAST_TOKENS = 2
TOKENS = "the number of tokens of a text, of which the first is not predicted,"


@dataclass(frozen=True)
class Sample:
    """Texts as tokens, each from its start.

    Attributes:
        name: where they are from.
        texts: tokens of each, int64 [T] of at least 2.
        left_out: texts that were drawn and are shorter.
    """

    name: str
    texts: tuple[Int64[Tensor, " T"], ...]
    left_out: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))


def corpus_sample(
    corpus: Corpus, split: Split, *, texts: int, tokens: int, seed: int = 0
) -> Sample:
    """Return the first ``tokens`` tokens of documents drawn from a split.

    Raises:
        InputError: a split without documents, or none of two tokens.
    """
    check_whole("the number of texts", texts, 1)
    check_whole(TOKENS, tokens, LEAST_TOKENS)
    numbers = documents_of(corpus, split)
    drawn = np.random.default_rng(seed).permutation(numbers)[:texts]
    lengths = np.minimum(corpus.lengths[drawn], tokens).tolist()
    rows = [
        corpus.read_tokens(start, length).astype(np.int64)
        for start, length in zip(corpus.starts[drawn].tolist(), lengths, strict=True)
    ]
    return _sample(f"{corpus.name}, {split}", [torch.from_numpy(row) for row in rows])


def document_sample(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    texts: int,
    tokens: int,
    seed: int = 0,
    name: str = "texts",
) -> Sample:
    """Return the first ``tokens`` tokens of texts drawn from all of ``documents``.

    They are those of :func:`prismlm.corpus.encode.encode_text`.

    Raises:
        InputError: no text, none of two tokens, or a tokenizer that is not a fast one.
    """
    from prismlm.corpus.words import encode

    check_whole("the number of texts", texts, 1)
    check_whole(TOKENS, tokens, LEAST_TOKENS)
    rng = np.random.default_rng(seed)
    kept: list[str] = []
    for number, document in enumerate(documents):
        if number < texts:
            kept.append(document.text)
        elif (place := int(rng.integers(number + 1))) < texts:
            kept[place] = document.text
    rows = [torch.tensor(encode(tokenizer, text)[0][:tokens]) for text in kept]
    return _sample(name, rows)


def check_sample(model: PreTrainedModel, sample: Sample) -> None:
    """Raise InputError for texts that a model cannot read: too long, or of another vocabulary."""
    check_window(model, max(map(len, sample.texts)))
    inputs = model.get_input_embeddings()
    assert inputs is not None
    weight = inputs.weight
    assert isinstance(weight, Tensor)
    largest = max(int(text.max()) for text in sample.texts)
    if largest >= len(weight):
        raise InputError(
            f"the texts hold token {largest} and the model has {len(weight)}: they were made with "
            "another tokenizer than the model's."
        )


def longer_than(sample: Sequence[Tensor], tokens: int) -> list[int]:
    """Return the numbers of the texts of at least so many tokens."""
    return [number for number, text in enumerate(sample) if len(text) >= tokens]


def of_one_length(texts: Sequence[Sized], at_once: int) -> Iterator[list[int]]:
    """Yield numbers of texts that are equally long, at most ``at_once`` tokens together.

    So nothing is padded: what a text gives does not depend on the others.
    """
    lengths = sorted({len(text) for text in texts}, reverse=True)
    for length in lengths:
        members = [number for number, text in enumerate(texts) if len(text) == length]
        rows = max(1, at_once // length)
        for first in range(0, len(members), rows):
            yield members[first : first + rows]


def _sample(name: str, rows: list[Tensor]) -> Sample:
    kept = tuple(row for row in rows if len(row) >= LEAST_TOKENS)
    if not kept:
        raise InputError(
            f"none of {len(rows)} texts of {name} has {LEAST_TOKENS} tokens: nothing is predicted "
            "in a text of one token. Give longer ones."
        )
    return Sample(name, kept, len(rows) - len(kept))
