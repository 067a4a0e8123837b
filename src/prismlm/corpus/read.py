"""Files and directories to a stream of checked documents."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from prismlm.corpus.chat import ASSISTANT, as_messages, chat_text, check_messages, is_messages
from prismlm.corpus.documents import MESSAGES, METADATA, Columns, Document, as_metadata
from prismlm.corpus.formats import EXTENSIONS, WHOLE_FILES, Row, extension, read_rows
from prismlm.errors import BadRow, InputError, check_kind, check_path, check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why a document is left out: whoever reads it, or where a corpus is built.
NO_TEXT, NO_ANSWER = "no text", "chat without an answer"
BAD_ROWS_LISTED = 5
# After the first bad row, others are looked for no longer.
LOOKING_SECONDS = 60.0

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

    Text and Markdown files (one document each), JSON, JSON lines (plain, ``.gz``, ``.zst``), CSV,
    Parquet and what ``datasets`` saves to disk are read as a stream; a file once, however often it
    is named. Documents without text are left out.

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
        left_out: how many documents it has left out, by the reason.
        tokenizer: by whose chat template rows of messages become texts; None: they are refused.

    Args:
        paths: what to read.
        columns: which columns hold the text and what is known about it.
        tokenizer: see above.
        skip_bad_rows: leave out rows that cannot be used (JSON that is not valid, a text that is
            not a string, an id that was there before …). Otherwise they are refused, all of them
            at once; None: so too, and the message names no option.
        answered_chats: leave out chats that no answer of the assistant is in; ``"last"``: those
            that do not end in one.

    Raises:
        InputError: a path does not exist or has an unknown extension, a directory holds nothing to
            read; while iterating: bad rows, a damaged file, a missing column, or no document.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        skip_bad_rows: bool | None = None,
        answered_chats: bool | Literal["last"] = False,
    ) -> None:
        self._prepare(columns, tokenizer, skip_bad_rows, answered_chats)
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
        self.total_bytes = sum(file.path.stat().st_size for file in self.files)

    def _prepare(
        self,
        columns: Columns | None,
        tokenizer: PreTrainedTokenizerBase | None,
        skip_bad_rows: bool | None,
        answered_chats: bool | Literal["last"],
    ) -> None:
        self.files: list[InputFile] = []
        self.unread: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.again = self.total_bytes = self.bytes_read = 0
        self.tokenizer = tokenizer
        self._columns = columns_of(columns)
        self._skip_bad_rows, self._answered_chats = skip_bad_rows, answered_chats
        self._documents: Counter[str] = Counter()
        self._may_be_empty = False

    @property
    def total(self) -> int | None:
        """The size of all that is read, or None where it is not known."""
        return self.total_bytes or None

    @property
    def share_read(self) -> float | None:
        """How much of all the pass under way has read, or None where that is not known."""
        return self.bytes_read / self.total_bytes if self.bytes_read else None

    def of(self, file: InputFile) -> DocumentReader:
        """Return a reader of one of the files alone, which may hold no document."""
        part = copy(self)
        part.files, part.total_bytes = [file], file.path.stat().st_size
        part._may_be_empty = True
        return part

    def __iter__(self) -> Iterator[Document]:
        self.bytes_read = 0
        self.left_out.clear()
        self._documents.clear()
        return self._checked(self._placed(), SeenIds(), yielded=self._may_be_empty)

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
        self,
        placed: Iterator[tuple[Document | BadRow, str]],
        seen: SeenIds,
        *,
        yielded: bool = False,
    ) -> Iterator[Document]:
        for document, place in placed:
            bad = self._problem(document, place, seen)
            if isinstance(bad, BadRow) and not self._skip_bad_rows:
                raise self._refusal(bad, placed, seen)
            if bad is not None:
                self.left_out[bad.reason if isinstance(bad, BadRow) else bad] += 1
                continue
            assert isinstance(document, Document)
            yielded = True
            self._documents[place.rpartition(":")[0]] += 1
            yield document
        if not yielded:
            left_out = f" Left out: {counted(self.left_out)}." if self.left_out else ""
            raise InputError(f"No documents: {self._names()} hold no text.{left_out}")

    def _problem(
        self, document: Document | BadRow, place: str, seen: SeenIds
    ) -> BadRow | str | None:
        """Return what is wrong with a row, or why it is left out anyway; None for a document."""
        if isinstance(document, BadRow):
            return document
        if not document.text or document.text.isspace():
            return NO_TEXT
        chat = document.messages if self._answered_chats else None
        whole = slice(-1 if self._answered_chats == "last" else 0, None)
        if chat is not None and all(one["role"] != ASSISTANT for one in chat[whole]):
            return NO_ANSWER
        if seen.add(document.doc_id):
            return None
        return BadRow(
            f"{place}: another document has the id {document.doc_id!r} too. Ids must be unique: "
            f"{self._way_out(document.doc_id)}",
            "id used before",
        )

    def _refusal(
        self, first: BadRow, placed: Iterator[tuple[Document | BadRow, str]], seen: SeenIds
    ) -> InputError:
        """Return the error that names all bad rows, looking for others behind the first."""
        bad, until, partial = [first], time.monotonic() + LOOKING_SECONDS, ""
        for document, place in placed:
            found = self._problem(document, place, seen)
            bad += [found] if isinstance(found, BadRow) else []
            if time.monotonic() > until:
                partial = f", as far as {LOOKING_SECONDS:.0f} s of reading showed"
                break
        way_out = "Fix the row" if len(bad) == 1 else "Fix them"
        if self._skip_bad_rows is not None:
            way_out += (
                ", or leave out such rows with --skip-bad-rows (in Python: skip_bad_rows=True)"
            )
        if len(bad) == 1:
            return InputError(f"{first} {way_out}.")
        reasons = Counter(one.reason for one in bad)
        listed = "".join(f"\n  {one}" for one in bad[:BAD_ROWS_LISTED])
        more = len(bad) - BAD_ROWS_LISTED
        listed += f"\n  … and {more:,} more" if more > 0 else ""
        return InputError(
            f"{len(bad):,} rows cannot be used ({counted(reasons)}){partial}:{listed}\n{way_out}."
        )

    def _names(self) -> str:
        names = ", ".join(str(file.path) for file in self.files[:3])
        return f"{names}{' …' if len(self.files) > 3 else ''}"

    def _placed(self) -> Iterator[tuple[Document | BadRow, str]]:
        finished = 0
        for file in self.files:
            try:
                for row in read_rows(file.path, self._columns):
                    self.bytes_read = finished + row.bytes_read
                    place = f"{file.path}:{row.number}"
                    yield self._document(file, row, place), place
            except BadRow as bad:
                yield bad, str(file.path)
            finished += file.path.stat().st_size
            self.bytes_read = finished

    def _document(self, file: InputFile, row: Row, place: str) -> Document | BadRow:
        if isinstance(row.values, BadRow):
            return row.values
        ending = extension(file.path) or ""
        own_id = file.name if ending in WHOLE_FILES else f"{file.name}:{row.number}"
        # A dataset is known by its directory, and its files by numbers.
        source = file.path.parent.name if ending == ".arrow" else file.path.name[: -len(ending)]
        return document_or_bad(row.values, place, own_id, source, self.tokenizer)

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


def document_or_bad(
    values: dict[str, Any],
    place: str,
    own_id: str,
    own_source: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Document | BadRow:
    """Check the values of a record by role and make a document of them, if they can be used.

    Raises:
        InputError: messages without a chat template to make a text of them.
    """
    text, messages = values.get("text"), None
    # A column that is named for its texts may hold chats as well.
    if MESSAGES in values or is_messages(text):
        messages = as_messages(values.get(MESSAGES, text))
        if tokenizer is None or not tokenizer.chat_template:
            raise _no_template(place, tokenizer)
        try:
            check_messages(messages, place)
        except InputError as error:
            return BadRow(str(error), "not a chat")
        try:
            text = chat_text(tokenizer, messages)
        except InputError as error:
            return BadRow(f"{place}: {error}", "chat that the template refuses")
    if not isinstance(text, str):
        kind = _kind(text)
        return BadRow(f"{place}: the text is a {kind}, expected a string.", f"text is a {kind}")
    try:
        check_text(f"{place}: the text", text)
    except InputError as error:
        return BadRow(str(error), "not valid Unicode")
    try:
        metadata = {role: as_metadata(values.get(role), place, role) for role in METADATA}
        doc_id = as_metadata(values.get("id"), place, "id") or own_id
    except InputError as error:
        return BadRow(str(error), "column is not text or a number")
    metadata["source"] = metadata["source"] or own_source
    return Document(doc_id, text, **metadata, messages=messages)


def _no_template(place: str, tokenizer: PreTrainedTokenizerBase | None) -> InputError:
    if tokenizer is None:
        return InputError(
            f"{place} has no text but messages, and here is no chat template to make a text of "
            "them: name the model that they are for (corpus build: --tokenizer MODEL), or a column "
            "of texts with --text-column."
        )
    return InputError(
        f"{place} has messages, and the tokenizer of {tokenizer.name_or_path} has no chat template "
        "to make a text of them. Take a model that has one, or put the chat_template.jinja of the "
        "model that it was made from beside its tokenizer."
    )


def counted(reasons: Mapping[str, int]) -> str:
    """Return how many rows were left out for which reasons, as "no text: 3, not valid JSON: 1"."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))


def _kind(value: Any) -> str:
    kinds = {NoneType: "null", bytes: "binary value", dict: "record"}
    numbers = dict.fromkeys((int, float, Decimal), "number")
    return (kinds | numbers).get(type(value), type(value).__name__)


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
        if "dataset_dict.json" in names:
            raise InputError(
                f"{directory} is a dataset with the splits {', '.join(sorted(subdirectories))}: "
                "name the directory of one of them."
            )
        if {"state.json", "dataset_info.json"} <= set(names):
            # A dataset that was saved to disk: its JSON files are not text, its caches copies.
            names = [n for n in names if n.endswith(".arrow") and not n.startswith("cache-")]
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
                        "remove or fix it."
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
