"""Files and directories to a stream of checked documents."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prismlm.corpus.chat import ASSISTANT, as_messages, chat_text, check_messages, is_messages
from prismlm.corpus.documents import MESSAGES, METADATA, Columns, Document, as_metadata
from prismlm.corpus.formats import EXTENSIONS, WHOLE_FILES, Row, extension, read_rows
from prismlm.errors import BadRow, InputError, check_kind, check_path, check_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Why a document is left out by whoever reads it.
NO_TEXT, NO_ANSWER = "no text", "chat without an answer"
BAD_ROWS_LISTED = 5
# How long the rest of the input is searched for more bad rows after the first.
SEARCH_SECONDS = 60.0
KINDS = {type(None): "null", bytes: "binary value", dict: "record"} | dict.fromkeys(
    (int, float, Decimal), "number"
)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# A document, or why a row is none; and where it stands, as errors name it.
Placed = tuple[Document | BadRow, str]


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
    """
    return iter(DocumentReader(paths, columns))


class DocumentReader:
    """A stream of documents that can be read more than once.

    Attributes:
        files: the files to read, in order.
        unread: how many files of each other extension the directories hold.
        again: how often a file came up that is read already.
        total, done: the size of all files, and how much of it this pass has read, in ``unit``.
        left_out: how many documents this pass has left out, by the reason.
        tokenizer: its chat template makes texts of rows of messages; None: they are refused.

    Args:
        paths: what to read.
        columns: which columns hold the text and what is known about it.
        tokenizer: see above.
        skip_bad_rows: leave out rows that cannot be used (JSON that is not valid, a text that is
            not a string, an id that was there before …). Otherwise they are refused, all of them
            at once; None: so too, and the message names no option.
        answered_chats: leave out chats without an answer of the assistant; ``"last"``: those that
            do not end in one.
    """

    unit = "bytes"

    def __init__(
        self,
        paths: Paths,
        columns: Columns | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        skip_bad_rows: bool | None = None,
        answered_chats: bool | Literal["last"] = False,
    ) -> None:
        kind = 'prismlm.corpus.Columns, as Columns(id="name")'
        self._columns = check_kind(
            "columns", Columns() if columns is None else columns, Columns, kind
        )
        self.tokenizer = tokenizer
        self._skip_bad_rows, self._answered_chats = skip_bad_rows, answered_chats
        self.unread, self.left_out = Counter[str](), Counter[str]()
        self._documents = Counter[str]()
        self.done = 0
        self.again = 0
        self.files, self.total = self._find(paths)

    def _find(self, paths: Any) -> tuple[list[InputFile], int | None]:
        """Return the files to read, and the total of all that is to be read."""
        named = [paths] if isinstance(paths, (str, os.PathLike)) else paths
        check_kind("what is to be read", named, Iterable, "a path, or a list of paths")
        places = [check_path("what is to be read", path) for path in named]
        found = [file for place in places for file in _expand(place, self.unread)]
        if not found:
            raise InputError("No input was named: give files or directories to read.")
        # A file that comes up again, by another name or through a link, is read once.
        once: dict[tuple[int, int], InputFile] = {}
        for file in found:
            once.setdefault(_identity(file.path), file)
        self.again = len(found) - len(once)
        return [*once.values()], sum(file.path.stat().st_size for file in once.values())

    @property
    def name(self) -> str:
        """What is read, as errors name it."""
        names = ", ".join(str(file.path) for file in self.files[:3])
        return f"{names}{' …' if len(self.files) > 3 else ''}"

    def manifest(self) -> dict[str, Any]:
        """Return what ``corpus.json`` says was read, after a pass over all documents."""
        listed = [
            {
                "name": file.name,
                "bytes": file.path.stat().st_size,
                "documents": self._documents[str(file.path)],
            }
            for file in self.files
        ]
        not_read = dict(sorted(self.unread.items()))
        return {"files": listed, "named_again": self.again, "not_read": not_read}

    def __iter__(self) -> Iterator[Document]:
        self.done = 0
        self.left_out.clear()
        self._documents.clear()
        placed, seen = self._placed(), set[int]()
        for document, place in placed:
            bad = self._problem(document, place, seen)
            if isinstance(bad, BadRow) and not self._skip_bad_rows:
                raise self._refusal(bad, placed, seen)
            if bad is not None:
                self.left_out[bad.reason if isinstance(bad, BadRow) else bad] += 1
                continue
            assert isinstance(document, Document)
            self._documents[place.rpartition(":")[0]] += 1
            yield document
        if not self._documents:
            left_out = f" Left out: {counted(self.left_out)}." if self.left_out else ""
            raise InputError(f"No documents: {self.name} hold no text.{left_out}")

    def _placed(self) -> Iterator[Placed]:
        before = 0
        for file in self.files:
            try:
                for row in read_rows(file.path, self._columns):
                    self.done = before + row.bytes_read
                    place = f"{file.path}:{row.number}"
                    yield self._document(file, row, place), place
            except BadRow as bad:
                yield bad, str(file.path)
            before += file.path.stat().st_size
            self.done = before

    def _document(self, file: InputFile, row: Row, place: str) -> Document | BadRow:
        if isinstance(row.values, BadRow):
            return row.values
        ending = extension(file.path) or ""
        own_id = file.name if ending in WHOLE_FILES else f"{file.name}:{row.number}"
        # A dataset is known by its directory, and its files by numbers.
        source = file.path.parent.name if ending == ".arrow" else file.path.name[: -len(ending)]
        return document_or_bad(row.values, place, own_id, source, self.tokenizer)

    def _problem(
        self, document: Document | BadRow, place: str, seen: set[int]
    ) -> BadRow | str | None:
        """Return what is wrong with a row, or why it is left out anyway; None for a document."""
        if isinstance(document, BadRow):
            return document
        if not document.text or document.text.isspace():
            return NO_TEXT
        if self._answered_chats and document.messages is not None:
            answers = document.messages[-1 if self._answered_chats == "last" else 0 :]
            if all(one["role"] != ASSISTANT for one in answers):
                return NO_ANSWER
        # Eight bytes of each id are enough to remember it by.
        if hash(document.doc_id) in seen:
            return BadRow(
                f"{place}: another document has the id {document.doc_id!r} too. Ids must be "
                "unique: change one, name another column with --id-column, or, where they are "
                "made of a file's name, name the directory above the files in place of them.",
                "id used before",
            )
        seen.add(hash(document.doc_id))
        return None

    def _refusal(self, first: BadRow, placed: Iterator[Placed], seen: set[int]) -> InputError:
        """Return the error that names all bad rows: the first, and others found behind it."""
        listed, reasons, partial = [first], Counter([first.reason]), ""
        until = time.monotonic() + SEARCH_SECONDS
        for document, place in placed:
            problem = self._problem(document, place, seen)
            if isinstance(problem, BadRow):
                reasons[problem.reason] += 1
                listed += [problem] if len(listed) < BAD_ROWS_LISTED else []
            if time.monotonic() > until:
                partial = f", in {SEARCH_SECONDS:.0f} s of reading"
                break
        way_out = "Fix the row" if len(listed) == 1 else "Fix them"
        if self._skip_bad_rows is not None:
            way_out += ", or leave out such rows with --skip-bad-rows (in Python: skip_bad_rows)"
        if len(listed) == 1:
            return InputError(f"{first} {way_out}.")
        title = f"{reasons.total():,} rows cannot be used ({counted(reasons)}){partial}:"
        return InputError("\n  ".join([title, *map(str, listed)]) + f"\n{way_out}.")


def document_or_bad(
    values: dict[str, Any],
    place: str,
    own_id: str,
    own_source: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Document | BadRow:
    """Make a document of a record's values by role, or say why that cannot be done."""
    text, messages = values.get("text"), None
    # A column that is named for its texts may hold chats as well.
    is_chat = MESSAGES in values or is_messages(text)
    template = _with_template(tokenizer, place) if is_chat else None
    reason = "not a chat"
    try:
        if template is not None:
            messages = as_messages(values.get(MESSAGES, text))
            check_messages(messages, place)
            reason = "chat that the template refuses"
            text = chat_text(template, messages)
        if not isinstance(text, str):
            kind = KINDS.get(type(text), type(text).__name__)
            reason = f"text is a {kind}"
            raise InputError(f"{place}: the text is a {kind}, expected a string.")
        reason = "not valid Unicode"
        check_text(f"{place}: the text", text)
        reason = "column is not text or a number"
        metadata = {role: as_metadata(values.get(role), place, role) for role in METADATA}
        doc_id = as_metadata(values.get("id"), place, "id") or own_id
    except InputError as error:
        said = str(error)
        return BadRow(said if said.startswith(place) else f"{place}: {said}", reason)
    metadata["source"] = metadata["source"] or own_source
    return Document(doc_id, text, **metadata, messages=messages)


def _with_template(
    tokenizer: PreTrainedTokenizerBase | None, place: str
) -> PreTrainedTokenizerBase:
    if tokenizer is None or not tokenizer.chat_template:
        of = "here" if tokenizer is None else f"in the tokenizer of {tokenizer.name_or_path}"
        raise InputError(
            f"{place} has no text but messages, and {of} is no chat template to make a text of "
            "them: name the model that they are for (corpus build: --tokenizer MODEL), put its "
            "chat_template.jinja beside its tokenizer, or name a column of texts with "
            "--text-column."
        )
    return tokenizer


def counted(reasons: Mapping[str, int]) -> str:
    """Return how many rows were left out for which reasons, as "no text: 3, not valid JSON: 1"."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))


def in_words(unread: Mapping[str, int]) -> str:
    """Return how many files of which kinds are not read, as "3 .pdf, 1 .docx"."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(unread.items()))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _expand(path: Path, unread: Counter[str]) -> list[InputFile]:
    known = f"Expected one of: {', '.join(EXTENSIONS)}."
    if not path.exists():
        raise InputError(f"{path} does not exist: expected a file or directory to read.")
    if path.is_file():
        if extension(path) is None:
            raise InputError(f"{path} has no extension that can be read. {known}")
        return [InputFile(path, path.name)]
    readable: list[InputFile] = []
    for file in _below(path):
        if extension(file) is None:
            unread[file.suffix.lower() or "without extension"] += 1
        elif file.is_file():
            readable.append(InputFile(file, file.relative_to(path).as_posix()))
        else:
            raise InputError(
                f"{file} is no file that can be read, or a link to one that is not there: remove "
                "or fix it."
            )
    if not readable:
        others = f" It has {in_words(unread)}." if unread else ""
        raise InputError(f"{path} holds no file that can be read. {known}{others}")
    return sorted(readable, key=lambda file: file.name)


def _below(path: Path) -> Iterator[Path]:
    """Yield the files below a directory, in no order; a directory once, whatever links lead to it.

    Hidden ones are passed over, and so is a finished corpus, which is an output.
    """
    seen = {_identity(path)}
    for directory, subdirectories, names in os.walk(path, followlinks=True):
        if "corpus.json" in names:
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
        new = {name: _identity(Path(directory, name)) for name in sorted(subdirectories)}
        subdirectories.clear()
        for name, identity in new.items():
            if not name.startswith(".") and identity not in seen:
                seen.add(identity)
                subdirectories.append(name)
        yield from (Path(directory, name) for name in names if not name.startswith("."))
