"""A lens opened for reading: contexts, cells and names of every prototype, and text around them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from torch import nn
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.encode import around_text, encoder_of
from prismlm.corpus.pieces import pieces_of
from prismlm.errors import FormatError, InputError, StaleLensError, check_whole
from prismlm.layers import PrototypeHead
from prismlm.lens import layout, suffixes
from prismlm.lens.cells import Cells
from prismlm.lens.probe import PROBE_FILE, Probe
from prismlm.lens.store import LensFiles, file_identity, files_of
from prismlm.lens.suffixes import Suffixes
from prismlm.lens.support import SupportScale

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

# The passages of one answer often share documents.
CACHED_DOCUMENTS = 64
# Prototypes with fewer positions are too rare to be named or listed.
MIN_PLACES = 10
CONVERGED = 0.99
# Enough text: converged after this share of it, with this share of prototypes having all contexts.
ENOUGH_AT, FILLED = 0.5, 0.95
META_FIELDS = ("tokens", "share_read", "documents", "split", "trained_on")
# Characters kept on either side of a token in a sentence without end.
MAX_CHARACTERS = 240
# The end of a sentence; special tokens of chats and texts end one too.
_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\n+|<\|[^|<>\s]*\|>|</?s>")


class Around(NamedTuple):
    """A token of the corpus with the text before and after it."""

    before: str
    token: str
    after: str

    def __str__(self) -> str:
        return f"{self.before}{self.token}{self.after}"


def sentence_around(text: str, left: int, right: int) -> Around:
    """Return the sentence around a span of a text, cut to 240 characters on either side."""
    begin = max(0, left - MAX_CHARACTERS)
    # A token may start with the space that ends the previous sentence.
    first = next((i for i in range(left, right) if not text[i].isspace()), left)
    ends = [match.end() for match in _END.finditer(text, begin, first)]
    begin = min(ends[-1], left) if ends else begin
    end = min(len(text), right + MAX_CHARACTERS)
    stop = _END.search(text, right, end)
    return Around(text[begin:left], text[left:right], text[right : stop.start() if stop else end])


def sentences(text: str) -> list[tuple[int, int]]:
    """Return the spans of the sentences of a text, without surrounding whitespace."""
    edges = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    spans: list[tuple[int, int]] = []
    for begin, end in pairwise(edges):
        sentence = text[begin:end]
        if words := sentence.strip():
            begin += len(sentence) - len(sentence.lstrip())
            spans.append((begin, begin + len(words)))
    return spans


def joined(text: str, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Strip leading whitespace of ascending spans, and join those with only whitespace between."""
    result: list[tuple[int, int]] = []
    for begin, end in spans:
        word = text[begin:end]
        begin += len(word) - len(word.lstrip())
        if begin == end:
            continue
        if result and not text[result[-1][1] : begin].strip():
            begin = result.pop()[0]
        result.append((begin, end))
    return result


class OwnText:
    """Tokens and text of the documents of a lens, with the interface of a corpus for reading.

    The decoded text differs where the tokenizer normalises, such as by lowercasing.
    """

    def __init__(self, cells: Cells, tokens: Suffixes, tokenizer: PreTrainedTokenizerBase) -> None:
        self._cells, self._tokenizer = cells, tokenizer
        self.starts, self._tokens = cells.starts, tokens
        self.prefix, self._suffix = around_text(tokenizer)
        self.eos_token_id = int(tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]
        self._encoder = encoder_of(tokenizer)
        self._decoded = lru_cache(2)(self._decode)

    def read_tokens(self, start: int, length: int) -> np.ndarray:
        """Return successive tokens from a global position on."""
        return self._tokens.tokens(start, length)

    def document_at(self, position: int) -> int:
        """Return the number of the document that a global position lies in."""
        return int(self._cells.document_of(np.array([position]))[0])

    def text(self, number: int) -> str:
        """Return the text of a document."""
        return self._decoded(number)[0]

    def spans(self, number: int) -> np.ndarray:
        """Return the span of each token of a document in its text, int64 [length, 2]."""
        return self._decoded(number)[1]

    def _decode(self, number: int) -> tuple[str, np.ndarray]:
        length = int(self._cells.lengths[number])
        ids = self.read_tokens(int(self.starts[number]), length)[:-1].tolist()
        before = len(self.prefix) * (ids[: len(self.prefix)] == self.prefix)
        after = len(self._suffix) * (ids[len(ids) - len(self._suffix) :] == self._suffix)
        tokens = np.array(ids[before : len(ids) - after], dtype=np.int64)
        pieces = pieces_of(self._tokenizer, tokens.tolist())
        text = "".join(piece.shown for piece in pieces)
        spans = self._encoder.byte_spans(text, tokens)
        if spans is None:
            ends = np.cumsum([len(piece.shown) for piece in pieces])
            begins = ends - [len(piece.text) if piece.number == 1 else 0 for piece in pieces]
            spans = np.stack([begins, ends], axis=1)
        end = np.full((after + 1, 2), len(text))
        return text, np.concatenate([np.zeros((before, 2), np.int64), spans, end])


class Lens:
    """A lens on a disk or in a store. Open one with :meth:`open`; tables are read on first use.

    Attributes:
        name, address: of its directory, which may be in a store.
        tokenizer: decodes the lens's own tokens if the corpus is missing; None for no text.
    """

    def __init__(self, files: Path | LensFiles, meta: layout.LensMeta, head: PrototypeHead) -> None:
        self.files, self.meta, self.head = files_of(files), meta, head
        self.files.meta = meta
        self.name, self.address = self.files.name, self.files.address
        self.num_prototypes = head.num_prototypes  # K
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self._moved_corpus: Path | None = None
        self._corpus: tuple[object, Corpus | None] = object(), None
        self._document = lru_cache(CACHED_DOCUMENTS)(self._read_document)

    @classmethod
    def open(
        cls,
        path: Path | str,
        model: nn.Module,
        head: PrototypeHead,
        tokenizer: str | None = None,
        *,
        decoder: bool = True,
    ) -> Lens:
        """Open a lens, and check its :class:`~prismlm.lens.probe.Probe` with the model.

        ``tokenizer`` is a fingerprint, None to leave it unchecked. Without a ``decoder`` that can
        run, only the output layer is compared.

        Raises:
            FormatError: not a lens, damaged or of another version.
            StaleLensError: built for another model, head or tokenizer.
        """
        files = files_of(path)
        meta = files.read_meta()
        now = {"prototypes": layout.prototypes_fingerprint(head), "tokenizer": tokenizer}
        if changed := [n for n, value in now.items() if value not in (None, getattr(meta, n))]:
            raise StaleLensError(
                f"the lens {files.address} was built for another model: the "
                f"{' and the '.join(changed)} changed since. {layout.REBUILD}"
            )
        lens = cls(files, meta, head)
        _ = lens.cells
        files.check([PROBE_FILE])
        Probe.open(files.path).check(model, files.address, decoder=decoder)
        return lens

    @property
    def path(self) -> Path:
        """The directory; of a lens in a store, that of copies of its smaller files."""
        return self.files.path

    def check_unchanged(self) -> None:
        """Raise StaleLensError if the lens was rebuilt or removed; reload new names."""
        if not self.files.changed():
            return
        with suppress(FormatError, InputError):
            # Of its own: what other threads read stays that of the lens that was opened.
            files = files_of(self.address)
            meta = files.read_meta()
            if meta == replace(self.meta, labels=meta.labels, map=meta.map):
                self.files, self.meta = files, meta
                for name in ("prototypes", "names", "categories", "by_size"):
                    vars(self).pop(name, None)
                return
        raise StaleLensError(layout.REPLACED.format(self.address))

    @cached_property
    def index(self) -> pa.Table:
        """``index.parquet``: the kept contexts, by prototype and rank."""
        self.check_unchanged()
        self.files.check([layout.INDEX_FILE])
        return layout.read_table(self.path / layout.INDEX_FILE)

    @cached_property
    def prototypes(self) -> pa.Table:
        """``prototypes.parquet``: one row per prototype."""
        self.files.local(layout.PROTOTYPES_FILE)
        return layout.read_prototypes(self.path, self.meta)

    @cached_property
    def names(self) -> list[str]:
        """The name of every prototype."""
        return self.prototypes["name"].to_pylist()

    @cached_property
    def categories(self) -> list[str | None]:
        """The category of every prototype; None without a label."""
        return self.prototypes["category"].to_pylist()

    @property
    def cells(self) -> Cells:
        """Every position, or a sample, in its nearest prototype's cell; checks for changes."""
        self.check_unchanged()
        return self._cells

    @cached_property
    def _cells(self) -> Cells:
        return Cells(self.files, self.meta.cells)

    @cached_property
    def cell_sizes(self) -> np.ndarray:
        """The positions that each prototype is nearest to, int64 [K]."""
        return self.cells.sizes(self.num_prototypes)

    @property
    def listed(self) -> np.ndarray:
        """Which prototypes lists show by default: those of ``MIN_PLACES`` or more, bool [K]."""
        return self.cell_sizes >= MIN_PLACES

    @cached_property
    def by_size(self) -> np.ndarray:
        """The prototypes by the size of their cell, the largest first, then by use, int64 [K].

        Use alone is misleading with fitted weights: the most used prototypes make small
        corrections and may be nearest to no position.
        """
        return np.lexsort((-self.prototypes["usage"].to_numpy(), -self.cell_sizes))

    @cached_property
    def support(self) -> SupportScale | None:
        """The scale of support from text that is not indexed; None with too little text."""
        return None if self.meta.support is None else SupportScale(**self.meta.support)

    @property
    def unsearchable(self) -> str | None:
        """Why text cannot be found in it word for word; None if it can."""
        names = [name for name in self.meta.files if name.startswith("suffixes-")]
        return suffixes.unsearchable(names) or self.files.too_large(names)

    @cached_property
    def suffixes(self) -> Suffixes | None:
        """The search for sequences in its text; None if it is :attr:`unsearchable`."""
        return None if self.unsearchable else self._stored

    @cached_property
    def _stored(self) -> Suffixes | None:
        if suffixes.DOCUMENTS_FILE not in self.meta.files:
            return None
        self.check_unchanged()
        self.files.check([name for name in self.meta.files if name.startswith("suffixes-")])
        return Suffixes(self.files)

    @property
    def corpus(self) -> Corpus | None:
        """The corpus it was built from; None if it is missing or has changed."""
        from prismlm.corpus.layout import META_FILE
        from prismlm.corpus.store import Corpus

        current = file_identity(self.corpus_path / META_FILE)
        if self._corpus[0] != current:
            self._document.cache_clear()
            corpus = None
            with suppress(InputError, FormatError, OSError):
                corpus = Corpus.open(self.corpus_path)
            same = corpus is not None and corpus.fingerprint == self.meta.corpus
            self._corpus = current, corpus if same else None
        return self._corpus[1]

    def corpus_for(self, use: str) -> Corpus:
        """Return the corpus; InputError, with what it is read for, if it is missing or changed."""
        corpus = self.corpus
        if corpus is None:
            raise InputError(
                f"the corpus of {self.address} is not at {self.corpus_path}, or has changed, and "
                f"{use}. Put it back, or build the lens again with `prismlm index`."
            )
        return corpus

    @property
    def corpus_path(self) -> Path:
        """Where its corpus is expected."""
        return self._moved_corpus or Path(self.meta.corpus_path)

    def use_corpus(self, path: Path | str) -> None:
        """Read its corpus from another directory; InputError if it is another corpus."""
        from prismlm.corpus.store import Corpus

        if Corpus.open(path).fingerprint != self.meta.corpus:
            raise InputError(
                f"{path} is not the corpus that the lens {self.name} was built from: expected the "
                f"directory where {self.meta.corpus_name} is now."
            )
        self._moved_corpus = Path(path)

    @property
    def text_source(self) -> Corpus | OwnText | None:
        """The corpus, or the lens's own tokens if that is missing.

        None if the lens was built without text, or was opened without a tokenizer.
        """
        corpus = self.corpus
        return self._own_text if corpus is None else corpus

    @cached_property
    def _own_text(self) -> OwnText | None:
        tokens = self._stored
        if tokens is None or not self.meta.with_text or self.tokenizer is None:
            return None
        return OwnText(self.cells, tokens, self.tokenizer)

    def _read_document(self, number: int) -> tuple[int, str, np.ndarray]:
        """Return a document's first position, its text, and the spans of its tokens."""
        source = self.text_source
        assert source is not None
        return int(source.starts[number]), source.text(number), source.spans(number)

    def sentence(self, position: int) -> Around | None:
        """Return the sentence around a global position; None without :attr:`text_source`."""
        source = self.text_source
        if source is None:
            return None
        start, text, spans = self._document(source.document_at(position))
        return sentence_around(text, *spans[position - start].tolist())

    def spans_in_sentence(self, position: int, others: Iterable[int]) -> list[tuple[int, int]]:
        """Return the spans of other tokens in the text of :meth:`sentence`, as :func:`joined`."""
        around, source = self.sentence(position), self.text_source
        if around is None or source is None:
            return []
        start, _, spans = self._document(source.document_at(position))
        sentence, begin = str(around), int(spans[position - start, 0]) - len(around.before)
        selected = spans[[other - start for other in others if other != position]] - begin
        inside = [(a, b) for a, b in selected.tolist() if a >= 0 and b <= len(sentence)]
        return joined(sentence, inside)

    @cached_property
    def first_rows(self) -> np.ndarray:
        """The first row of each prototype in the index, and the end, int64 [K + 1]."""
        prototypes = np.arange(self.num_prototypes + 1)
        return np.searchsorted(self.index["prototype"].to_numpy(), prototypes)

    def rows_of(self, prototype: int) -> slice:
        """Return the index rows of one prototype, best context first."""
        check_whole("the prototype", prototype, most=self.num_prototypes - 1)
        return slice(int(self.first_rows[prototype]), int(self.first_rows[prototype + 1]))

    def shares(self, column: str) -> dict[str, float]:
        """Return the share of the text of each value of a column, the largest first."""
        keys, rates = self.cells.keys(column), self.cells.base_rates(column)
        shares = {key: float(rate) for key, rate in zip(keys.names, rates, strict=True)}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def default_group_by(self) -> str:
        """The column that shares are grouped by: domain, or source if there is one domain."""
        return "domain" if len(self.cells.keys("domain").names) > 1 else "source"


def inspect_lens(lens: Lens) -> dict[str, Any]:
    """Measure a lens, as JSON values; every file is compared with its digest.

    - ``share_read``: of the windows of the corpus; ``tokens`` and all other figures are of these
    - ``with_contexts``, ``in_use``: prototypes with a context, and those used at least once
    - ``kept``, ``filled``: contexts kept per prototype, and prototypes in use that have as many
    - ``converged_at``: the first share of the text at which the mean nearest cosine is within 1 %
      of its final value
    - ``enough``, ``verdict``: see :func:`verdict`
    """
    lens.files.check()
    meta, contexts, kept = lens.meta, lens.index, np.diff(lens.first_rows)
    used = lens.prototypes["usage"].to_numpy() > 0
    last = meta.convergence[-1]["mean_nearest_cosine"] if meta.convergence else 0.0
    near = last - (1 - CONVERGED) * abs(last)
    converged = (row["share"] for row in meta.convergence if row["mean_nearest_cosine"] >= near)
    converged_at, in_use = next(converged, 1.0), int(used.sum())
    filled = int((used & (kept >= meta.contexts)).sum())
    enough, sentence = verdict(converged_at, in_use, filled, meta.contexts)
    return {
        **{name: getattr(meta, name) for name in META_FIELDS},
        "prototypes": lens.num_prototypes,
        "with_contexts": int((kept > 0).sum()),
        "in_use": in_use,
        "kept": meta.contexts,
        "filled": filled,
        "convergence": meta.convergence,
        "converged_at": converged_at,
        "contexts": len(contexts),
        "distinct_documents": len(contexts["doc_id"].unique()),
        "licenses": [{"license": k, "share": v} for k, v in lens.shares("license").items()],
        "enough": enough,
        "verdict": sentence,
    }


def verdict(converged_at: float, in_use: int, filled: int, kept: int) -> tuple[bool, str]:
    """Return whether there was enough text for an index, and why.

    The second half of the text must have raised the mean nearest cosine by less than 1 %, and 95 %
    of the prototypes in use must have all their contexts.
    """
    enough = converged_at <= ENOUGH_AT and filled >= FILLED * in_use
    return enough, (
        f"{'Enough' if enough else 'Not enough'} text for this index: the mean nearest cosine was "
        f"within 1 % of its last value after {converged_at:.0%} of the text, and {filled:,} of "
        f"{in_use:,} active prototypes have their {kept} stored contexts."
        f"{'' if enough else ' Index a larger corpus.'}"
    )


def lens_summary(directory: Path) -> dict[str, int | float]:
    """Return how much a lens holds."""
    meta = layout.read_meta(directory)
    usage = layout.read_prototypes(directory, meta)["usage"].to_numpy()
    return {
        "tokens": meta.tokens,
        "share_read": meta.share_read,
        "documents": meta.documents,
        "positions": int(meta.cells["rows"]),
        "prototypes": len(usage),
        "in_use": int((usage > 0).sum()),
    }
