"""What probes read: texts of a corpus or of files, and forward passes over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from prismlm.errors import InputError, check_whole
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import check_window
from prismlm.models.seam import capture, run_decoder
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.documents import Document
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch


Watcher = Callable[["WindowBatch"], AbstractContextManager[None]]
"""Takes the batch of a forward pass, and looks into the pass while its block is open."""


def collect(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *watchers: Watcher,
    title: str,
    progress: Reporter = SILENT,
) -> None:
    """Run batches through the decoder in evaluation mode, each pass seen by the watchers."""
    with evaluating(model), progress.task(title) as task:
        for batch in batches:
            check_window(model, batch.input_ids.shape[1])
            with ExitStack() as stack:
                for watcher in watchers:
                    stack.enter_context(watcher(batch))
                if uncertainty_of(model) is None:
                    run_decoder(model, batch.input_ids, batch.attention_mask)
                else:
                    # The codes that are fed back come from the whole model's logits.
                    ids = batch.input_ids.to(model.device)
                    mask = batch.attention_mask.to(model.device).long()
                    stack.enter_context(capture(model, logits=False))
                    model(input_ids=ids, attention_mask=mask, use_cache=False)
            task.advance(int(batch.owned.sum()))


def target_losses(
    logits: Float[Tensor, "*batch V"], targets: Int64[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """Return the cross-entropy of each target, nats; float64, on the CPU."""
    rows = logits.float()
    chosen = rows.gather(-1, targets.to(rows.device)[..., None])[..., 0]
    return (rows.logsumexp(-1) - chosen).double().cpu()


def documents_of(corpus: Corpus, split: Split, least: int = 0) -> np.ndarray:
    """Return the numbers of a split's documents of at least ``least`` tokens, ascending."""
    numbers = corpus.split(split)
    if not len(numbers):
        raise InputError(
            f"the corpus {corpus.name!r} has no documents in {split!r}: take another split, or "
            "build it with `prismlm corpus build` and another --heldout share."
        )
    lengths = corpus.lengths[numbers]
    if not (lengths >= least).any():
        raise InputError(
            f"no document of {corpus.name!r}, {split}, has {least:,} tokens: the longest has "
            f"{int(lengths.max()):,}. Take a shorter window, or a corpus of longer documents."
        )
    return numbers[lengths >= least]


@dataclass(frozen=True)
class Sample:
    """Texts as tokens, each from its start.

    Attributes:
        name: where they come from.
        texts: tokens of each, int64 [T] of at least 2.
        left_out: how many texts were drawn but are shorter.
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
    """Return the first ``tokens`` tokens of documents drawn from a split."""
    _check_size(texts, tokens)
    drawn = np.random.default_rng(seed).permutation(documents_of(corpus, split))[:texts]
    lengths = np.minimum(corpus.lengths[drawn], tokens).tolist()
    rows = [
        torch.from_numpy(corpus.read_tokens(start, length).astype(np.int64))
        for start, length in zip(corpus.starts[drawn].tolist(), lengths, strict=True)
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
    """Return the first ``tokens`` tokens of texts drawn from all ``documents``."""
    from prismlm.corpus.words import encode

    _check_size(texts, tokens)
    rng, drawn = np.random.default_rng(seed), list[str]()
    for number, document in enumerate(documents):
        if number < texts:
            drawn.append(document.text)
        elif (place := int(rng.integers(number + 1))) < texts:
            drawn[place] = document.text
    return _sample(name, [torch.tensor(encode(tokenizer, text)[0][:tokens]) for text in drawn])


def _check_size(texts: int, tokens: int) -> None:
    check_whole("the number of texts", texts, 1)
    check_whole("the number of tokens of a text, of which the first is not predicted,", tokens, 2)


def _sample(name: str, rows: list[Tensor]) -> Sample:
    kept = tuple(row for row in rows if len(row) > 1)
    if not kept:
        raise InputError(
            f"none of {len(rows)} texts of {name} has 2 tokens: nothing is predicted in a text of "
            "one token. Give longer ones."
        )
    return Sample(name, kept, len(rows) - len(kept))


def of_one_length(texts: Sequence[Sized], at_once: int) -> Iterator[list[int]]:
    """Yield numbers of equally long texts, at most ``at_once`` tokens together, longest first.

    Nothing is padded, so what a text gives does not depend on the others.
    """
    for length in sorted({len(text) for text in texts}, reverse=True):
        members = [number for number, text in enumerate(texts) if len(text) == length]
        rows = max(1, at_once // length)
        for first in range(0, len(members), rows):
            yield members[first : first + rows]
