"""Texts that probes run a model over, as tokens, and the losses of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm.corpus.documents import Document
from prismlm.corpus.store import Corpus, Split
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.lens.options import trained_length, training_corpus
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import LogitMap, output_embedding

LOGIT_ROWS = 1024
# Tokens per window of a model without recorded training rows.
DEFAULT_LENGTH = 256


def open_corpus(model: Path, corpus: Path | None = None) -> Corpus:
    """Open a corpus, by default the training corpus of a model directory."""
    return training_corpus(model) if corpus is None else Corpus.open(corpus)


def open_text(
    path: Path, corpus: Path | None, split: Split, tokens: int | None, length: int | None = None
) -> tuple[PreTrainedModel, Sequences]:
    """Open a model, and windows of :func:`open_corpus`, as long as in training by default."""
    model, tokenizer = read_checkpoint(path)
    text = open_corpus(path, corpus)
    check_tokenizer_of(text, tokenizer, path.resolve().name)
    row = trained_length(path) or DEFAULT_LENGTH if length is None else length
    return model, Sequences(text, split, row, tokens)


def target_losses(
    logits: Float[Tensor, "*batch V"], targets: Int64[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """Return the cross-entropy of each target, nats; float64, on the CPU."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    target_logits = logits.gather(-1, targets.to(logits.device)[..., None])[..., 0]
    return (logits.logsumexp(-1) - target_logits).double().cpu()


def losses_at(
    model: PreTrainedModel, states: Float[Tensor, "N d"], targets: Int64[Tensor, " N"]
) -> Float64[Tensor, " N"]:
    """Return :func:`target_losses` after last hidden states, a few rows of logits at a time."""
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    parts = zip(states.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    return torch.cat([target_losses(logit_map(embedding(rows)), ids) for rows, ids in parts])


def document_numbers(corpus: Corpus, split: Split, min_tokens: int = 0) -> np.ndarray:
    """Return the numbers of a split's documents of at least ``min_tokens`` tokens, ascending."""
    numbers, lengths = corpus.split(split), corpus.lengths
    chosen = numbers[lengths[numbers] >= min_tokens]
    if not len(chosen):
        raise InputError(
            f"no document of {corpus.name!r}, {split}, has {min_tokens:,} tokens: the longest has "
            f"{int(lengths[numbers].max(initial=0)):,}. Choose another split, a shorter window, or "
            "a corpus of longer documents."
        )
    return chosen


@dataclass(frozen=True)
class Sample:
    """The first tokens of some texts, at least 2 of each."""

    name: str  # where they come from
    texts: tuple[Int64[Tensor, " T"], ...]
    left_out: int = 0  # sampled texts that are shorter

    @property
    def tokens(self) -> int:
        """The total number of tokens."""
        return sum(map(len, self.texts))


def corpus_sample(
    corpus: Corpus, split: Split, *, texts: int, tokens: int, seed: int = 0
) -> Sample:
    """Return the first ``tokens`` tokens of documents sampled from a split."""
    numbers = np.random.default_rng(seed).permutation(document_numbers(corpus, split))[:texts]
    lengths = np.minimum(corpus.lengths[numbers], tokens).tolist()
    rows = [
        torch.from_numpy(corpus.read_tokens(start, length).astype(np.int64))
        for start, length in zip(corpus.starts[numbers].tolist(), lengths, strict=True)
    ]
    return _sample(f"{corpus.name}, {split}", rows)


def document_sample(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase,
    *,
    texts: int,
    tokens: int,
    seed: int = 0,
    name: str = "texts",
) -> Sample:
    """Return the first ``tokens`` tokens of a reservoir sample of ``documents``."""
    from prismlm.corpus.pieces import encode

    rng, reservoir = np.random.default_rng(seed), list[str]()
    for number, document in enumerate(documents):
        if number < texts:
            reservoir.append(document.text)
        elif (slot := int(rng.integers(number + 1))) < texts:
            reservoir[slot] = document.text
    return _sample(name, [torch.tensor(encode(tokenizer, text)[0][:tokens]) for text in reservoir])


def _sample(name: str, rows: list[Tensor]) -> Sample:
    texts = tuple(row for row in rows if len(row) > 1)
    if not texts:
        raise InputError(
            f"none of the {len(rows)} texts of {name} has 2 tokens, and the first token of a text "
            "is not predicted: provide longer texts."
        )
    return Sample(name, texts, len(rows) - len(texts))
