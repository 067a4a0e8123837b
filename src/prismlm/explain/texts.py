"""Reading many texts: windows of any of them in one forward pass, memory set by one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.chat import encode_chat
from prismlm.corpus.encode import around_text, encode_text
from prismlm.errors import InputError
from prismlm.explain.attribution import Attribution, attribute, joined
from prismlm.explain.positions import ContextPrior, Method, carriers_of
from prismlm.explain.prediction import split_states
from prismlm.explain.summary import fits
from prismlm.explain.support import Support
from prismlm.lens.opened_model import check_embedded
from prismlm.models.seam import capture

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

LONGEST_DEFAULT_WINDOW = 1024
# Is called with how many predictions a forward pass gave; False ends the reading.
OnPass = Callable[[int], bool | None]


@dataclass(frozen=True)
class TextOptions:
    """How texts are read.

    Attributes:
        window: tokens read at once; a longer text is split.
        stride: tokens between windows. A prediction comes from the earliest window that gives it
            window − stride tokens of context, or its text's start.
        tokens_per_batch: tokens of one forward pass, with padding.
        method: of the attribution.
    """

    window: int
    stride: int
    tokens_per_batch: int = 1024
    method: Method = "evidence"


def text_options(
    models: list[PrismLM],
    window: int | None = None,
    stride: int | None = None,
    method: Method = "evidence",
) -> TextOptions:
    """Return options that suit every model; by default the longest window, up to 1,024 tokens.

    Raises:
        InputError: the window does not fit a model, or would leave tokens out.
    """
    lengths = [lm.context_length for lm in models]
    longest = min((n for n in lengths if n is not None), default=None)
    if window is None:
        window = min(longest or LONGEST_DEFAULT_WINDOW, LONGEST_DEFAULT_WINDOW)
    if longest is not None and window > longest:
        raise InputError(
            f"a window of {window} tokens does not fit a model that reads {longest}: pass "
            f"--window {longest} or less."
        )
    if window < 2:
        raise InputError(f"a window of {window} tokens predicts nothing: expected at least 2.")
    stride = max(1, window * 3 // 4) if stride is None else stride
    if not 1 <= stride <= window:
        raise InputError(f"--stride is {stride}: expected 1 to {window}, the window.")
    return TextOptions(window, stride, method=method)


@dataclass(frozen=True)
class TextFigures:
    """What a model's predictions along one text rely on; of a chat, along its last answer.

    Attributes:
        document: the text.
        tokens: how many it has; each but the first is predicted.
        losses: −log p of every predicted token, float32 [tokens − 1].
        explained: explained share at every position, for the model's top token there.
        attribution: of all predictions, or None without a lens or predictions.
    """

    document: Document
    tokens: int
    losses: np.ndarray
    explained: np.ndarray
    attribution: Attribution | None

    @property
    def support(self) -> Support | None:
        """How well the corpus supports it; None where that is not known, or the head is wrong."""
        if self.attribution is None or not fits(float(np.median(self.explained))):
            return None
        return self.attribution.support


def document_ids(lm: PrismLM, document: Document) -> list[int]:
    """Return the tokens of a text or a chat.

    Raises:
        InputError: one of them has no embedding.
    """
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

    Args:
        lm: the model.
        documents: the texts.
        options: how they are read.
        on_pass: is called after every forward pass.

    Raises:
        DecompositionError: the parts of a logit do not sum to the model's own.
    """
    for batch in _batches(_windows(lm, documents, options), options.tokens_per_batch):
        read = [window for window in batch if window.stop > window.skip]
        if read:
            _read_batch(lm, read, options.method)
        done = sum(window.stop - window.skip for window in read)
        ended = on_pass is not None and on_pass(done) is False
        for window in batch:
            if window.last:
                yield _figures(window.text)
        if ended:
            return


@dataclass
class _Text:
    """A text, its first prediction that counts, and what its windows have given so far."""

    document: Document
    ids: Tensor
    first: int
    prior: ContextPrior | None
    losses: list[Tensor] = field(default_factory=lambda: [torch.empty(0)])
    explained: list[Tensor] = field(default_factory=lambda: [torch.empty(0)])
    attributions: list[Attribution] = field(default_factory=list[Attribution])


class _Window(NamedTuple):
    """Predictions ``skip`` to ``stop`` of a window ``ids`` that starts at a token of its text."""

    text: _Text
    ids: Tensor
    start: int
    skip: int
    stop: int
    last: bool

    @property
    def first(self) -> int:
        """Which prediction of the text is the window's first."""
        return self.start + self.skip


def _figures(text: _Text) -> TextFigures:
    losses, explained = (
        torch.cat(parts)[text.first :].numpy() for parts in (text.losses, text.explained)
    )
    attribution = joined(text.attributions) if text.attributions else None
    return TextFigures(text.document, len(text.ids), losses, explained, attribution)


def _windows(lm: PrismLM, documents: Iterable[Document], options: TextOptions) -> Iterator[_Window]:
    from prismlm.corpus.windows import document_windows

    prefix = torch.tensor(around_text(lm.tokenizer)[0], dtype=torch.int64)
    zero = np.zeros(1, dtype=np.int64)
    for document in documents:
        ids = torch.tensor(document_ids(lm, document), dtype=torch.int64)
        before = lm.asked(document.messages, ids) if document.messages else 0
        prior = ContextPrior(lm.lens.cells) if lm.lens is not None else None
        text, count = _Text(document, ids, max(0, before - 1), prior), len(ids)
        # The last token predicts nothing of the text, so it gets no window of its own.
        lengths = np.array([max(1, count - 1)])
        how = options.window, options.stride, prefix.tolist()
        grid = document_windows(zero, zero, lengths, *how)
        rows = zip(grid.start.tolist(), grid.length.tolist(), grid.skip.tolist(), strict=True)
        for number, (start, length, skip) in enumerate(rows, 1):
            read = ids[start:][:length]
            if start:
                # As in an index, windows inside a text begin as texts do.
                read = torch.cat([prefix, read[len(prefix) :]])
            stop = max(skip, min(length, count - 1 - start))
            yield _Window(text, read, start, skip, stop, number == len(grid))


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
def _read_batch(lm: PrismLM, batch: list[_Window], method: Method) -> None:
    """Run the model once and give every text what its windows hold."""
    device = lm.model.device
    ids = pad_sequence([window.ids for window in batch], batch_first=True)
    attended = pad_sequence([torch.ones_like(one.ids) for one in batch], batch_first=True)
    with capture(lm.model) as seen:
        lm.model(input_ids=ids.to(device), attention_mask=attended.to(device), use_cache=False)
    assert seen.embedded is not None
    spans = [(row, slice(window.skip, window.stop)) for row, window in enumerate(batch)]
    z = torch.cat([seen.z[row, span] for row, span in spans]).float()
    embedded = torch.cat([seen.embedded[row, span] for row, span in spans])
    read, targets = (
        torch.cat([w.text.ids[w.first + by : w.start + w.stop + by] for w in batch])
        for by in (0, 1)
    )
    output = lm.output_layer
    split = split_states(output, lm.head, z, embedded, read, targets.to(device))
    explained = output.parts(lm.head, z, split.routing, split.scores.top).explained_share.cpu()
    split, end = split.cpu(), 0
    for window in batch:
        rows = slice(end, end := end + window.stop - window.skip)
        text = window.text
        text.losses.append(-split.scores.log_probabilities[rows])
        text.explained.append(explained[rows])
        if lm.lens is not None:
            carriers = carriers_of(split[rows], lm.lens, method, text.prior)
            # Predictions before the answer of a chat are the context that these come after.
            counted = range(window.stop - window.skip)[max(0, text.first - window.first) :]
            if counted:
                text.attributions.append(attribute(carriers.of(counted), lm.lens, method))
