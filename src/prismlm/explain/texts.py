"""Figures of many texts: batches of windows from any of them, in the memory of one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.chat import encode_chat
from prismlm.corpus.encode import around_text, encode_text
from prismlm.corpus.windows import document_windows
from prismlm.errors import InputError
from prismlm.explain.attribution import Attribution, ContextPrior, attribute, joined, spread
from prismlm.explain.prediction import is_plausible, split_states
from prismlm.explain.support import Support
from prismlm.lens.opened_model import check_embedded
from prismlm.models.seam import capture

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

MAX_DEFAULT_WINDOW = 1024
TOKENS_PER_BATCH = 1024


def window_of(models: Sequence[PrismLM], window: int | None = None) -> int:
    """Return a window that suits every model; by default the longest, up to 1,024 tokens."""
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
    return window


@dataclass(eq=False)
class TextFigures:
    """What a model's predictions along one text rely on; of a chat, along its last answer."""

    document: Document  # the text
    ids: Tensor  # its tokens; each but the first is predicted
    first: int  # the first prediction that counts
    prior: ContextPrior | None
    # Of its windows so far: losses and explained shares, [2, n], and attributions.
    parts: list[Tensor] = field(default_factory=lambda: [torch.empty(2, 0)])
    attributions: list[Attribution] = field(default_factory=list[Attribution])

    @property
    def losses(self) -> np.ndarray:
        """−log p of every prediction that counts, float32."""
        return torch.cat(self.parts, 1)[0, self.first :].numpy()

    @property
    def explained(self) -> np.ndarray:
        """The explained share at every such position, for the model's top token there."""
        return torch.cat(self.parts, 1)[1, self.first :].numpy()

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


class _Window(NamedTuple):
    """Some tokens of a text, from ``start`` on; it gives the predictions ``rows`` of them."""

    text: TextFigures
    ids: Tensor
    start: int
    rows: slice
    size: int  # the number of its predictions
    last: bool


def read_texts(
    lm: PrismLM, documents: Iterable[Document], window: int | None = None
) -> Iterator[TextFigures]:
    """Yield the figures of every text, in order; the target of each prediction is the text's own.

    Windows begin every three quarters of one: a prediction comes from the earliest window that
    gives it a quarter of context, or its text's start.
    """
    for batch in _batches(_windows(lm, documents, window_of([lm], window))):
        if predicting := [window for window in batch if window.size]:
            _run_batch(lm, predicting)
        yield from (window.text for window in batch if window.last)


def _windows(lm: PrismLM, documents: Iterable[Document], size: int) -> Iterator[_Window]:
    prefix = around_text(lm.tokenizer)[0]
    zero, opening = np.zeros(1, dtype=np.int64), torch.tensor(prefix, dtype=torch.int64)
    for document in documents:
        text = _unread(lm, document)
        # The last token predicts no token of the text, so it gets no window of its own.
        lengths = np.array([max(1, len(text.ids) - 1)])
        grid = document_windows(zero, zero, lengths, size, size * 3 // 4, prefix)
        for number in range(len(grid)):
            start, length, skip = (int(c[number]) for c in (grid.start, grid.length, grid.skip))
            ids = text.ids[start:][:length]
            if start:
                # As in an index, windows inside a text begin with the prefix of texts.
                ids = torch.cat([opening, ids[len(prefix) :]])
            stop = max(skip, min(length, len(text.ids) - 1 - start))
            last = number == len(grid) - 1
            yield _Window(text, ids, start, slice(skip, stop), stop - skip, last)


def _unread(lm: PrismLM, document: Document) -> TextFigures:
    """Encode a text or a chat; InputError for a token without an embedding."""
    if document.messages:
        tokens = encode_chat(lm.tokenizer, document.messages)
    else:
        tokens = encode_text(lm.tokenizer, document.text)
    check_embedded(lm.model, lm.tokenizer, tokens, lm.path, f"the text {document.doc_id!r}")
    ids = torch.tensor(tokens, dtype=torch.int64)
    before = lm.answer_start(document.messages, ids) if document.messages else 0
    prior = ContextPrior(lm.lens.cells) if lm.lens is not None else None
    return TextFigures(document, ids, max(0, before - 1), prior)


def _batches(windows: Iterable[_Window]) -> Iterator[list[_Window]]:
    batch: list[_Window] = []
    widest = 0
    for window in windows:
        widest = max(widest, len(window.ids))
        if batch and widest * (len(batch) + 1) > TOKENS_PER_BATCH:
            yield batch
            batch, widest = [], len(window.ids)
        batch.append(window)
    if batch:
        yield batch


@torch.no_grad()
def _run_batch(lm: PrismLM, batch: list[_Window]) -> None:
    """Run the model once, and add the figures of each window to its text."""
    device, output = lm.model.device, lm.output_layer
    ids = pad_sequence([window.ids for window in batch], batch_first=True)
    attended = pad_sequence([torch.ones_like(window.ids) for window in batch], batch_first=True)
    with capture(lm.model) as seen:
        lm.model(input_ids=ids.to(device), attention_mask=attended.to(device), use_cache=False)
    assert seen.embedded is not None
    z = torch.cat([seen.z[row, window.rows] for row, window in enumerate(batch)]).float()
    raw = torch.cat([seen.embedded[row, window.rows] for row, window in enumerate(batch)])
    tokens, targets = (
        torch.cat([w.text.ids[w.start + by :][w.rows] for w in batch]) for by in (0, 1)
    )
    split = split_states(output, lm.head, z, tokens, targets.to(device), raw_logits=raw)
    parts = output.parts(lm.head.prototypes, z, split.routing, split.scores.top)
    figures = torch.stack([-split.scores.log_probabilities, parts.explained_share]).cpu()
    split, end = split.cpu(), 0
    for window in batch:
        rows = slice(end, end := end + window.size)
        text = window.text
        text.parts.append(figures[:, rows])
        if lm.lens is not None:
            carriers = spread(split[rows], lm.lens.cells, lm.lens.head, text.prior)
            # In a chat, predictions before the answer are its context and do not count.
            first = max(0, text.first - window.start - window.rows.start)
            if first < window.size:
                counted = carriers.select(range(first, window.size))
                text.attributions.append(attribute(counted, lm.lens))
