"""A lens opened for reading: contexts, cells, names and text of every prototype."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from torch import nn

from prismlm.errors import FormatError, InputError, StaleLensError, check_whole
from prismlm.layers import PrototypeHead
from prismlm.lens import layout, suffixes
from prismlm.lens.cells import Cells
from prismlm.lens.probe import PROBE_FILE, Probe
from prismlm.lens.store import LensFiles, file_identity, files_of
from prismlm.lens.suffixes import StoredTokens, Suffixes
from prismlm.lens.support import SupportScale
from prismlm.lens.text import Around, OwnText, joined, sentence_around

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prismlm.corpus.store import Corpus

T = TypeVar("T")
Stored = TypeVar("Stored", bound=StoredTokens)
# The passages of one answer often share documents.
CACHED_DOCUMENTS = 64
# Prototypes with fewer positions are too rare to be named or listed.
MIN_PLACES = 10


class lens_property(cached_property[T]):
    """A cached property of a lens that checks at every access that the lens is unchanged."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:  # pyright: ignore
        if instance is not None:
            instance.check_unchanged()
        return super().__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:  # pyright: ignore
        # A data descriptor: Python calls __get__ even if the value is cached.
        instance.__dict__[str(self.attrname)] = value


class Lens:
    """A lens on a disk or in a store. Open one with :meth:`open`; tables are read on first use.

    Attributes:
        name, address: of its directory, which may be in a store.
        tokenizer: decodes the lens's own tokens if the corpus is missing; None for no text.
    """

    def __init__(self, files: Path | LensFiles, meta: layout.LensMeta, head: PrototypeHead) -> None:
        self.files, self.meta, self.head = files_of(files), meta, head
        self.name, self.address = self.files.name, self.files.address
        self.num_prototypes = head.num_prototypes  # K
        self._opened = self.files.identity()
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
        opened = files.identity()
        meta = files.read_meta()
        layout.check_fresh(meta, files.address, head, tokenizer)
        lens = cls(files, meta, head)
        lens._opened = opened
        _ = lens.cells
        files.check(meta, [PROBE_FILE])
        Probe.open(files.path).check(model, files.address, decoder=decoder)
        return lens

    @property
    def path(self) -> Path:
        """The directory; of a lens in a store, that of copies of its smaller files."""
        return self.files.path

    def check_unchanged(self) -> None:
        """Raise StaleLensError if the lens was rebuilt or removed; reload new names."""
        current = self.files.identity()
        if current == self._opened:
            return
        with suppress(FormatError, InputError):
            # Of its own: what other threads read stays that of the lens that was opened.
            files = files_of(self.address)
            meta = files.read_meta()
            if meta == replace(self.meta, labels=meta.labels, map=meta.map):
                self.files, self.meta, self._opened = files, meta, current
                for name in ("prototypes", "names", "categories", "by_size"):
                    self.__dict__.pop(name, None)
                return
        raise StaleLensError(layout.REPLACED.format(self.address))

    def _check_files(self, names: Collection[str], most: float = layout.COMPARED_BYTES) -> None:
        self.files.check(self.meta, names, most=most)

    @lens_property
    def index(self) -> pa.Table:
        """``index.parquet``: the kept contexts, by prototype and rank."""
        self._check_files([layout.INDEX_FILE], math.inf)
        return layout.read_table(self.path / layout.INDEX_FILE, layout.INDEX_SCHEMA)

    @lens_property
    def prototypes(self) -> pa.Table:
        """``prototypes.parquet``: one row per prototype."""
        self.files.local(layout.PROTOTYPES_FILE)
        return layout.read_prototypes(self.path, self.meta)

    @lens_property
    def names(self) -> list[str]:
        """The name of every prototype."""
        return self.prototypes["name"].to_pylist()

    @lens_property
    def categories(self) -> list[str | None]:
        """The category of every prototype; None without a label."""
        return self.prototypes["category"].to_pylist()

    @lens_property
    def cells(self) -> Cells:
        """Every position, or a sample, in the cell of its nearest prototype."""
        return Cells(self.files, self.meta.cells, self._check_files)

    @cached_property
    def cell_sizes(self) -> np.ndarray:
        """The positions that each prototype is nearest to, int64 [K]."""
        return self.cells.sizes(self.num_prototypes)

    @property
    def listed(self) -> np.ndarray:
        """Which prototypes lists show by default: those of ``MIN_PLACES`` or more, bool [K]."""
        return self.cell_sizes >= MIN_PLACES

    @lens_property
    def by_size(self) -> np.ndarray:
        """The prototypes by the size of their cell, the largest first, then by use, int64 [K].

        Use alone is misleading with fitted weights: the most used prototypes make small
        corrections and may be nearest to no position.
        """
        return np.lexsort((-self.prototypes["usage"].to_numpy(), -self.cell_sizes))

    @lens_property
    def support(self) -> SupportScale | None:
        """The scale of support from text that is not indexed; None with too little text."""
        return None if self.meta.support is None else SupportScale(**self.meta.support)

    @property
    def unsearchable(self) -> str | None:
        """Why text cannot be found in it word for word; None if it can."""
        names = [name for name in self.meta.files if name.startswith("suffixes-")]
        return suffixes.unsearchable(names) or self.files.too_large(names)

    @lens_property
    def suffixes(self) -> Suffixes | None:
        """The search for sequences in its text; None if it is :attr:`unsearchable`."""
        return None if self.unsearchable else self._stored(Suffixes)

    def _stored(self, kind: type[Stored]) -> Stored | None:
        if suffixes.DOCUMENTS_FILE not in self.meta.files:
            return None
        names = [name for name in self.meta.files if name.startswith("suffixes-")]
        self._check_files(names)
        return kind(self.files)

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
        tokens = self._stored(StoredTokens)
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
        start, text, spans = self._document(source.document_at(position))
        left, right = spans[position - start].tolist()
        begin, end = left - len(around.before), right + len(around.after)
        selected = spans[[other - start for other in others if other != position]].tolist()
        inside = [(a - begin, b - begin) for a, b in selected if begin <= a and b <= end]
        return joined(text[begin:end], inside)

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
