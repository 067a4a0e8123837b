"""Figures of many texts: batches of windows from any of them, in the memory of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.chat import encode_chat
from prismlm.corpus.encode import around_text, encode_text
from prismlm.errors import InputError
from prismlm.explain.attribution import (
    Attribution,
    ContextPrior,
    attribute,
    joined,
    spread,
)
from prismlm.explain.prediction import is_plausible, split_states
from prismlm.explain.support import Support
from prismlm.lens.opened_model import check_embedded
from prismlm.models.seam import capture

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

MAX_DEFAULT_WINDOW = 1024
# Called with the number of predictions of each forward pass; False ends the run.
OnPass = Callable[[int], bool | None]


@dataclass(frozen=True)
class TextOptions:
    """How texts are split into windows."""

    window: int  # tokens of a window
    # Tokens between windows. A prediction comes from the earliest window that gives it window −
    # stride tokens of context, or its text's start.
    stride: int
    tokens_per_batch: int = 1024  # tokens of one forward pass, with padding


def text_options(models: list[PrismLM], window: int | None = None) -> TextOptions:
    """Return options that suit every model; by default the longest window, up to 1,024 tokens.

    Windows begin every three quarters of one.
    """
    lengths = [lm.context_length for lm in models]
    longest = min((n for n in lengths if n is not None), default=None)
    if window is None:
        window = min(longest or MAX_DEFAULT_WINDOW, MAX_DEFAULT_WINDOW)
    if longest is not None and window > longest:
        raise InputError(
            f"a window of {window} tokens does not fit a model that reads {longest}: pass "
            f"--window {longest} or less."
        )
    if window < 2:
        raise InputError(f"a window of {window} tokens predicts nothing: expected at least 2.")
    return TextOptions(window, window * 3 // 4)


@dataclass(eq=False)
class TextFigures:
    """What a model's predictions along one text rely on; of a chat, along its last answer."""

    document: Document  # the text
    ids: Tensor  # its tokens; each but the first is predicted
    first: int  # the first prediction that counts
    prior: ContextPrior | None
    # The figures of its windows so far.
    loss_parts: list[Tensor] = field(default_factory=lambda: [torch.empty(0)])
    explained_parts: list[Tensor] = field(default_factory=lambda: [torch.empty(0)])
    attributions: list[Attribution] = field(default_factory=list[Attribution])

    @property
    def losses(self) -> np.ndarray:
        """−log p of every prediction that counts, float32."""
        return torch.cat(self.loss_parts)[self.first :].numpy()

    @property
    def explained(self) -> np.ndarray:
        """The explained share at every such position, for the model's top token there."""
        return torch.cat(self.explained_parts)[self.first :].numpy()

    @cached_property
    def attribution(self) -> Attribution | None:
        """The attribution of all these; None without a lens or predictions."""
        return joined(self.attributions) if self.attributions else None

    @property
    def support(self) -> Support | None:
        """How well the corpus supports it; None if unknown, or if the head does not fit."""
        if self.attribution is None or not is_plausible(float(np.median(self.explained))):
            return None
        return self.attribution.support


def document_ids(lm: PrismLM, document: Document) -> list[int]:
    """Return the tokens of a text or a chat; InputError for a token without an embedding."""
    if document.messages:
        ids = encode_chat(lm.tokenizer, document.messages)
    else:
        ids = encode_text(lm.tokenizer, document.text)
    check_embedded(lm.model, lm.tokenizer, ids, lm.path, f"the text {document.doc_id!r}")
    return ids


def read_texts(
    lm: PrismLM,
    documents: Iterable[Document],
    options: TextOptions,
    on_pass: OnPass | None = None,
) -> Iterator[TextFigures]:
    """Yield the figures of every text, in order; the target of each prediction is the text's own.

    ``on_pass`` is called after every forward pass.
    """
    for batch in _batches(_windows(lm, documents, options), options.tokens_per_batch):
        predicting = [window for window in batch if window.stop > window.skip]
        if predicting:
            _run_batch(lm, predicting)
        count = sum(window.stop - window.skip for window in predicting)
        stop = on_pass is not None and on_pass(count) is False
        for window in batch:
            if window.last:
                yield window.text
        if stop:
            return


class _Window(NamedTuple):
    """Predictions ``skip`` to ``stop`` of a window ``ids`` that starts at a token of its text."""

    text: TextFigures
    ids: Tensor
    start: int
    skip: int
    stop: int
    last: bool


def _windows(lm: PrismLM, documents: Iterable[Document], options: TextOptions) -> Iterator[_Window]:
    from prismlm.corpus.windows import document_windows

    prefix = torch.tensor(around_text(lm.tokenizer)[0], dtype=torch.int64)
    zero = np.zeros(1, dtype=np.int64)
    for document in documents:
        ids = torch.tensor(document_ids(lm, document), dtype=torch.int64)
        before = lm.answer_start(document.messages, ids) if document.messages else 0
        prior = ContextPrior(lm.lens.cells) if lm.lens is not None else None
        text, count = TextFigures(document, ids, max(0, before - 1), prior), len(ids)
        # The last token predicts no token of the text, so it gets no window of its own.
        lengths = np.array([max(1, count - 1)])
        grid = document_windows(
            zero, zero, lengths, options.window, options.stride, prefix.tolist()
        )
        rows = zip(grid.start.tolist(), grid.length.tolist(), grid.skip.tolist(), strict=True)
        for number, (start, length, skip) in enumerate(rows, 1):
            tokens = ids[start:][:length]
            if start:
                # As in an index, windows inside a text begin with the prefix of texts.
                tokens = torch.cat([prefix, tokens[len(prefix) :]])
            stop = max(skip, min(length, count - 1 - start))
            yield _Window(text, tokens, start, skip, stop, number == len(grid))


def _batches(windows: Iterable[_Window], tokens: int) -> Iterator[list[_Window]]:
    batch: list[_Window] = []
    widest = 0
    for window in windows:
        widest = max(widest, len(window.ids))
        if batch and widest * (len(batch) + 1) > tokens:
            yield batch
            batch, widest = [], len(window.ids)
        batch.append(window)
    if batch:
        yield batch


@torch.no_grad()
def _run_batch(lm: PrismLM, batch: list[_Window]) -> None:
    """Run the model once, and add the figures of each window to its text."""
    device = lm.model.device
    ids = pad_sequence([window.ids for window in batch], batch_first=True)
    attended = pad_sequence([torch.ones_like(window.ids) for window in batch], batch_first=True)
    with capture(lm.model) as seen:
        lm.model(input_ids=ids.to(device), attention_mask=attended.to(device), use_cache=False)
    assert seen.embedded is not None
    spans = [(row, slice(window.skip, window.stop)) for row, window in enumerate(batch)]
    z = torch.cat([seen.z[row, span] for row, span in spans]).float()
    raw = torch.cat([seen.embedded[row, span] for row, span in spans])
    tokens, targets = (
        torch.cat([w.text.ids[w.start + w.skip + by : w.start + w.stop + by] for w in batch])
        for by in (0, 1)
    )
    output = lm.output_layer
    split = split_states(output, lm.head, z, tokens, targets.to(device), raw_logits=raw)
    parts = output.parts(lm.head.prototypes, z, split.routing, split.scores.top)
    explained = parts.explained_share.cpu()
    split, end = split.cpu(), 0
    for window in batch:
        rows = slice(end, end := end + window.stop - window.skip)
        text = window.text
        text.loss_parts.append(-split.scores.log_probabilities[rows])
        text.explained_parts.append(explained[rows])
        if lm.lens is not None:
            carriers = spread(split[rows], lm.lens.cells, lm.lens.head, text.prior)
            # In a chat, predictions before the answer are its context and do not count.
            first = max(0, text.first - window.start - window.skip)
            counted = range(window.stop - window.skip)[first:]
            if counted:
                text.attributions.append(attribute(carriers.select(counted), lm.lens))
