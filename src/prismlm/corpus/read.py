"""Files and directories to a stream of checked documents."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from prismlm.corpus.chat import as_messages, chat_text, check_messages, is_messages
from prismlm.corpus.documents import MESSAGES, METADATA, Columns, Document, as_metadata
from prismlm.corpus.formats import EXTENSIONS, WHOLE_FILES, extension, read_rows
from prismlm.errors import InputError, check_kind, check_path, check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read; ``name`` is what ids are made of when there is no id column."""

    path: Path
    name: str


def sample_path() -> Path:
    """Return the Parquet file of the bundled sample; ATTRIBUTION.md beside it credits its sources.

    Columns: id, text, domain, source, license, title, url.
    """
    return Path(str(files("prismlm.corpus"))) / "sample" / "sample.parquet"


def read_documents(paths: Paths, columns: Columns | None = None) -> Iterator[Document]:
    """Yield every document of the files and directories, in sorted order within a directory.

    Text and Markdown files (one document each), JSON, JSON lines (plain, ``.gz``, ``.zst``), CSV
    and Parquet are read as a stream; a file once, however often it is named. Documents without
    text are left out.

    Raises:
        InputError: see :class:`DocumentReader`.
    """
    return iter(DocumentReader(paths, columns))


class DocumentReader:
    """A stream of documents that can be read more than once.

    Attributes:
        files: the files to read, in order.
        unread: how many files of each other extension the directories hold.
        again: how many times a file came up that is read already.
        total_bytes: the size of all files.
        bytes_read: how much of it the pass under way has read.
        skipped: how many documents without text it has left out.
        tokenizer: by whose chat template rows of messages become texts; None: they are refused.

    Raises:
        InputError: a path does not exist or has an unknown extension, a directory holds nothing to
            read; while iterating: a damaged file, a missing column, a text that is not a string,
            two documents with one id, or no document at all.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.unread: Counter[str] = Counter()
        named = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        check_kind("what is to be read", named, Iterable, "a path, or a list of paths")
        places = [check_path("what is to be read", path) for path in named]
        found = [file for place in places for file in _expand(place, self.unread)]
        if not found:
            raise InputError("No input was named: give files or directories to read.")
        # What is there already, by another name or through a link, is not read again.
        once: dict[tuple[int, int], InputFile] = {}
        for file in found:
            once.setdefault(_identity(file.path), file)
        self.files = list(once.values())
        self.again = len(found) - len(self.files)
        self.tokenizer: PreTrainedTokenizerBase | None = tokenizer
        self._documents: Counter[str] = Counter()
        self.total_bytes = sum(file.path.stat().st_size for file in self.files)
        self.bytes_read = 0
        self.skipped = 0
        self._columns = columns_of(columns)

    @property
    def total(self) -> int | None:
        """The size of all that is read, or None where it is not known."""
        return self.total_bytes or None

    def __iter__(self) -> Iterator[Document]:
        self.bytes_read = self.skipped = 0
        self._documents.clear()
        return self._checked(self._placed(), SeenIds())

    def manifest(self) -> dict[str, Any]:
        """Return what ``corpus.json`` says was read, after a pass over all documents."""
        return {
            "files": [
                {
                    "name": file.name,
                    "bytes": file.path.stat().st_size,
                    "documents": self._documents[str(file.path)],
                }
                for file in self.files
            ],
            "named_again": self.again,
            "not_read": dict(sorted(self.unread.items())),
        }

    def _checked(
        self, placed: Iterator[tuple[Document, str]], seen: SeenIds, *, yielded: bool = False
    ) -> Iterator[Document]:
        for document, place in placed:
            if not document.text or document.text.isspace():
                self.skipped += 1
                continue
            if not seen.add(document.doc_id):
                self._refuse_duplicate(document.doc_id, place)
            yielded = True
            self._documents[place.rpartition(":")[0]] += 1
            yield document
        if not yielded:
            raise InputError(
                f"No documents: {self._names()} hold no text "
                f"({self.skipped} empty documents were skipped)."
            )

    def _names(self) -> str:
        names = ", ".join(str(file.path) for file in self.files[:3])
        return f"{names}{' …' if len(self.files) > 3 else ''}"

    def _placed(self) -> Iterator[tuple[Document, str]]:
        finished = 0
        for file in self.files:
            for row in read_rows(file.path, self._columns):
                self.bytes_read = finished + row.bytes_read
                place, ending = f"{file.path}:{row.number}", extension(file.path) or ""
                own_id = file.name if ending in WHOLE_FILES else f"{file.name}:{row.number}"
                source = file.path.name[: -len(ending)]
                yield make_document(row.values, place, own_id, source, self.tokenizer), place
            finished += file.path.stat().st_size
            self.bytes_read = finished

    def _refuse_duplicate(self, doc_id: str, place: str) -> None:
        # Only hashes are kept, so the first place is looked for again; not finding it means that
        # two different ids share a 64-bit hash.
        for document, first in self._placed():
            if document.doc_id == doc_id and first != place:
                raise InputError(
                    f"Two documents have the id {doc_id!r}: {first} and {place}. Ids must be "
                    f"unique: {self._way_out(doc_id)}"
                )
            if first == place:
                return

    def _way_out(self, doc_id: str) -> str:
        """Return how two documents of one id get ids of their own."""
        alike = [file for file in self.files if doc_id.rpartition(":")[0] == file.name]
        alike = alike or [file for file in self.files if doc_id == file.name]
        if len(alike) < 2:
            return "change one, or name another column with --id-column."
        above = os.path.commonpath([file.path.parent for file in alike]) or os.curdir
        return (
            f"these are made of the file's name, which is the same in several directories. Name "
            f"the directory above them in place of them, {above}: then ids begin with what is "
            "below it."
        )


def columns_of(columns: object) -> Columns:
    """Return the columns that were named, or the usual ones for None."""
    kinds = (Columns, type(None))
    return (
        check_kind("columns", columns, kinds, 'prismlm.corpus.Columns, as Columns(id="name")')
        or Columns()
    )


def make_document(
    values: dict[str, Any],
    place: str,
    own_id: str,
    own_source: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Document:
    """Check the values of a record by role and make a document of them.

    Raises:
        InputError: the text or what is known about it cannot be used.
    """
    text, messages = values.get("text"), None
    # A column that is named for its texts may hold chats as well.
    if MESSAGES in values or is_messages(text):
        messages = as_messages(values.get(MESSAGES, text))
        text = _chat(messages, place, tokenizer)
    if not isinstance(text, str):
        raise InputError(
            f"{place}: the text is a {_kind(text)}, expected a string. "
            "Mend the row or name another column with --text-column."
        )
    check_text(f"{place}: the text", text)
    metadata = {role: as_metadata(values.get(role), place, role) for role in METADATA}
    if metadata["source"] is None:
        metadata["source"] = own_source
    doc_id = as_metadata(values.get("id"), place, "id") or own_id
    return Document(doc_id, text, **metadata, messages=messages)


def _chat(messages: Any, place: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return what the chat template makes of a row's messages."""
    if tokenizer is None:
        raise InputError(
            f"{place} has no text but messages, and here is no chat template to make a text of "
            "them: name the model that they are for (corpus build: --tokenizer MODEL), or a column "
            "of texts with --text-column."
        )
    check_messages(messages, place)
    try:
        return chat_text(tokenizer, messages)
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def _kind(value: Any) -> str:
    # Fractions in JSON are read as decimals.
    names = {NoneType: "null", Decimal: "float"}
    return names.get(type(value), type(value).__name__)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _expand(path: Path, unread: Counter[str]) -> list[InputFile]:
    known = ", ".join(EXTENSIONS)
    if not path.exists():
        raise InputError(f"{path} does not exist: expected a file or directory to read.")
    if path.is_file():
        if extension(path) is None:
            raise InputError(f"{path} has no extension that can be read. Expected one of: {known}.")
        return [InputFile(path, path.name)]
    found: list[InputFile] = []
    for file in _below(path):
        if extension(file) is None:
            unread[file.suffix.lower() or "without extension"] += 1
        else:
            found.append(InputFile(file, file.relative_to(path).as_posix()))
    if not found:
        others = f" It has {in_words(unread)}." if unread else ""
        raise InputError(
            f"{path} holds no file that can be read. Expected one of: {known}.{others}"
        )
    return sorted(found, key=lambda file: file.name)


def _below(path: Path) -> Iterator[Path]:
    """Yield the files below a directory, in no order; a directory once, whatever links lead to it.

    Raises:
        InputError: a link that leads nowhere, or a pipe, by the name of a text.
    """
    seen = {_identity(path)}
    for directory, subdirectories, names in os.walk(path, followlinks=True):
        if "corpus.json" in names:
            # A finished corpus below the inputs is an output, not text to read again.
            subdirectories.clear()
            continue
        kept: list[str] = []
        for name in sorted(subdirectories):
            identity = _identity(Path(directory, name))
            if not name.startswith(".") and identity not in seen:
                seen.add(identity)
                kept.append(name)
        subdirectories[:] = kept
        for name in names:
            file = Path(directory, name)
            if not name.startswith("."):
                if extension(file) is not None and not file.is_file():
                    raise InputError(
                        f"{file} is no file that can be read, or a link to one that is not there: "
                        "remove or mend it."
                    )
                yield file


def in_words(unread: Mapping[str, int]) -> str:
    """Return how many files of which kinds are not read, as "3 .pdf, 1 .docx"."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(unread.items()))


class SeenIds:
    """A set of ids at eight bytes each: recent ones in a set, the others in a sorted array."""

    _RECENT = 1 << 16

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._sorted = np.empty(0, dtype=np.uint64)

    def add(self, doc_id: str) -> bool:
        """Add an id; return False if its hash was there."""
        digest = hashlib.blake2b(doc_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        at = int(np.searchsorted(self._sorted, np.uint64(key)))
        if key in self._recent or (at < len(self._sorted) and int(self._sorted[at]) == key):
            return False
        self._recent.add(key)
        if len(self._recent) == self._RECENT:
            recent = np.fromiter(self._recent, dtype=np.uint64, count=self._RECENT)
            self._sorted = np.union1d(self._sorted, recent)
            self._recent.clear()
        return True
