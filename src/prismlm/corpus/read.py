"""Files and directories to a stream of checked documents."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from prismlm.corpus.chat import ASSISTANT, as_messages, check_messages, is_messages, render_chat
from prismlm.corpus.documents import MESSAGES, METADATA, Columns, Document, as_metadata
from prismlm.corpus.formats import (
    DIVISIBLE,
    EXTENSIONS,
    InputFile,
    Row,
    Span,
    extension,
    is_remote,
    read_rows,
)
from prismlm.corpus.layout import id_hash
from prismlm.errors import BadRow, InputError, check_kind, check_path, check_text, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Reasons to leave out a valid row.
NO_TEXT, NO_ANSWER = "no text", "chat without an answer"
SKIP = "leave out and count such rows with --skip-bad-rows (in Python: skip_bad_rows=True)"
SAVED_DATASET = (
    "`corpus build` takes its directory as --dataset DIR (in Python: HubDataset); for other "
    "commands write it as Parquet (Dataset.to_parquet)."
)
KINDS = {type(None): "null", bytes: "binary value", dict: "record"}
KINDS |= dict.fromkeys((int, float, Decimal), "number")

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# Input of a part, unless it is chosen: the most that an interruption loses.
PART_BYTES = 2**28
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)")


def sample_path() -> Path:
    """Return the Parquet file of the bundled sample; ATTRIBUTION.md credits its sources."""
    return Path(str(files("prismlm.corpus"))) / "sample" / "sample.parquet"


class DocumentReader:
    """The documents of files and directories, in sorted order within a directory.

    Text and Markdown files (one document each), JSON, JSON lines (plain, ``.gz``, ``.zst``), CSV
    and Parquet are read as a stream, each file once, and again if it is iterated again. Documents
    without text are left out.

    Attributes:
        files: the files to read, in order.
        ignored: the number of files with other extensions in the directories, by extension.
        documents: how many documents this pass has read, by file.
        total, done: the size of what is read, and how much of it this pass has read, in ``unit``.
        left_out: how many documents this pass has left out, by reason.
        number: of the last document, from 0; repeated ids are counted.
        tokenizer: renders rows of messages by its chat template; None refuses them.

    Args:
        paths: files and directories, also as addresses of a store or UPath objects; or a list of
            :class:`InputFile`.
        columns: which columns hold the text and its metadata.
        tokenizer: see above.
        skip_bad_rows: leave out rows that cannot be used (invalid JSON, a text that is not a
            string, a duplicate id …). Otherwise the first is an error; for None it does not
            mention this option.
        answered_chats: leave out chats without an answer of the assistant; ``"last"``: those that
            do not end in one.
        share: ``(i, n)`` reads part i of n, from 0: a file, row group or line belongs to the part
            in which its first byte lies, so that parts together read what one reader does.
        used: hashes of ids that count as used before; None: ids may be used again.
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
        share: tuple[int, int] = (0, 1),
        used: Sequence[int] | None = (),
    ) -> None:
        expected = 'prismlm.corpus.Columns, as Columns(id="name")'
        columns = Columns() if columns is None else columns
        self._columns = check_kind("columns", columns, Columns, expected)
        self.tokenizer = tokenizer
        self._skip_bad_rows, self._answered_chats = skip_bad_rows, answered_chats
        self._share, self._used, self._seen, self._file = share, used, set[int](), ""
        self.ignored, self.left_out = Counter[str](), Counter[str]()
        self.documents = Counter[str]()
        self.done = self.number = 0
        self.files, self.total = self._open(paths)

    def _open(self, inputs: Any) -> tuple[list[InputFile], int | None]:
        """Return the files to read, and ``total``."""
        is_one = isinstance(inputs, (str, os.PathLike)) or is_remote(inputs)
        paths: Any = [inputs] if is_one else inputs
        check_kind("the input", paths, Iterable, "a path, or a list of paths")
        files: list[Any] = list(paths)
        if not files:
            raise InputError("No input was named: give files or directories to read.")
        if not all(isinstance(file, InputFile) for file in files):
            # A file with several names or links is read once.
            distinct: dict[object, InputFile] = {}
            for file in (file for path in files for file in _expand(_located(path), self.ignored)):
                distinct.setdefault(_identity(file.path), file)
            files = list(distinct.values())
        return files, sum(file.size for file in files)

    def default_parts(self) -> int:
        """Return the number of parts that a build divides this input into."""
        return max(1, math.ceil((self.total or 0) / PART_BYTES))

    @property
    def name(self) -> str:
        """The input, for error messages."""
        names = ", ".join(str(file.path) for file in self.files[:3])
        return f"{names}{' …' if len(self.files) > 3 else ''}"

    def __iter__(self) -> Iterator[Document]:
        self.done, self.number, self._seen = 0, -1, set(self._used or ())
        self.left_out.clear()
        self.documents.clear()
        for row in self._rows():
            self.done = row.done
            try:
                document = self._document(row)
                reason = self._reason(document, row.location)
            except BadRow as bad:
                if not self._skip_bad_rows:
                    skip = f", or {SKIP}" if self._skip_bad_rows is not None else ""
                    raise InputError(f"{bad} Fix the row{skip}.") from bad
                self.left_out[bad.reason] += 1
                continue
            if reason is not None:
                self.left_out[reason] += 1
                continue
            self._file = row.location.rpartition(":")[0]
            self.documents[self._file] += 1
            yield document
        # Of several parts, some may be empty.
        if not self.documents and self._share[1] == 1:
            left_out = f" Left out: {count_list(self.left_out)}." if self.left_out else ""
            raise InputError(f"No documents: no text in {self.name}.{left_out}")

    def leave_out(self, reason: str) -> None:
        """Count the last document as left out."""
        self.left_out[reason] += 1
        self.documents[self._file] -= 1

    def ids(self) -> np.ndarray:
        """Return the sorted hashes of the ids of this pass: uint64, without those used before."""
        ids = np.fromiter(self._seen, np.uint64, len(self._seen))
        return np.setdiff1d(ids, np.array(self._used or (), np.uint64))

    def locate(self, hashes: Collection[int]) -> tuple[str, str]:
        """Return the location and id of the first document with one of these hashes of ids."""
        for row in self._rows():
            try:
                document = self._document(row)
            except BadRow:
                continue
            if id_hash(document.doc_id) in hashes:
                return row.location, document.doc_id
        raise AssertionError("no row has one of these ids")

    def _rows(self) -> Iterator[Row]:
        (number, count), size = self._share, self.total or 0
        begin, end = size * number // count, size * (number + 1) // count
        before = 0
        for file in self.files:
            # Files without bytes may come after the last byte.
            start, stop = begin - before, math.inf if number == count - 1 else end - before
            is_shared = file.kind in DIVISIBLE and start < file.size and stop > 0
            if start <= 0 < stop or is_shared:
                for row in read_rows(file, self._columns, Span(max(0, start), stop)):
                    yield row._replace(done=max(0, row.done - start))
            before += file.size

    def _document(self, row: Row) -> Document:
        """Return the document of a row, or raise BadRow."""
        if isinstance(row.values, BadRow):
            raise row.values
        values, location, text = row.values, row.location, row.values.get("text")
        messages, marks, reason = None, None, "not a chat"
        # A named text column may hold chats as well.
        is_chat = MESSAGES in values or is_messages(text)
        tokenizer = self._with_template(location) if is_chat else None
        try:
            if tokenizer is not None:
                messages = as_messages(values.get(MESSAGES, text))
                check_messages(messages, location)
                reason = "chat that the template refuses"
                text, marks = render_chat(tokenizer, messages)
            if not isinstance(text, str):
                kind = KINDS.get(type(text), type(text).__name__)
                reason = f"text is a {kind}"
                raise InputError(f"{location}: the text is a {kind}, expected a string.")
            reason = "not valid Unicode"
            check_text(f"{location}: the text", text)
            reason = "column is not text or a number"
            metadata = {role: as_metadata(values.get(role), location, role) for role in METADATA}
            doc_id = as_metadata(values.get("id"), location, "id") or row.doc_id
        except InputError as error:
            message = str(error).removeprefix(f"{location}: ")
            raise BadRow(f"{location}: {message}", reason) from error
        metadata["source"] = metadata["source"] or row.source
        return Document(doc_id, text, **metadata, messages=messages, marks=marks)

    def _with_template(self, location: str) -> PreTrainedTokenizerBase:
        if self.tokenizer is not None and self.tokenizer.chat_template:
            return self.tokenizer
        raise InputError(
            f"{location} has no text but messages, and there is no tokenizer with a chat template: "
            "name the model that they are for (corpus build: --tokenizer MODEL), add its "
            "chat_template.jinja to the tokenizer, or name a text column with --text-column."
        )

    def _reason(self, document: Document, location: str) -> str | None:
        """Return why a document is left out, or None; raise BadRow for an id used before."""
        if not document.text or document.text.isspace():
            return NO_TEXT
        if self._answered_chats and document.messages is not None:
            answers = document.messages[-1 if self._answered_chats == "last" else 0 :]
            if all(one["role"] != ASSISTANT for one in answers):
                return NO_ANSWER
        self.number += 1
        if self._used is not None:
            # Eight bytes of each id use less memory than the ids.
            key = id_hash(document.doc_id)
            if key in self._seen:
                raise repeated_id(location, document.doc_id)
            self._seen.add(key)
        return None


def repeated_id(location: str, doc_id: str) -> BadRow:
    """Return the error for an id that was used before; "" if only its hash is known."""
    name = f"the id {doc_id!r}" if doc_id else "the id of a document that was left out"
    return BadRow(
        f"{location}: another document has {name} too. Ids "
        "must be unique: change one, choose another column with --id-column, or, if they are made "
        "of file names, name the directory above the files instead.",
        "id used before",
    )


def count_list(reasons: Mapping[str, int]) -> str:
    """Return counts by reason as "no text: 3, not valid JSON: 1"."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in sorted(reasons.items()))


def _located(given: Any) -> Any:
    """Return a path of this machine, or of a store that has an address, such as s3://bucket/dir."""
    remote = given
    if not is_remote(given):
        path = check_path("the input", given)
        # A path on the command line has lost one of the two slashes.
        address = ADDRESS.match(str(path))
        if address is None or path.exists():
            return path
        if address[1] == "file":
            return Path("/", address[2])
        remote = f"{address[1]}://{address[2]}"
    try:
        from upath import UPath

        remote = UPath(remote)
        with suppress(FileNotFoundError):  # which is named later
            remote.stat()  # some file systems do not exist while they cannot be reached
    except Exception as error:  # each file system has its own errors
        raise InputError(
            f"{remote} cannot be read ({first_line(error)}). Remote input needs "
            "`pip install prismlm[remote]`, the package of its store, such as s3fs or gcsfs, and "
            "access to it; file systems are those of fsspec."
        ) from error
    return remote


def _identity(path: Any) -> object:
    if is_remote(path):
        return str(path)
    status = path.stat()
    return status.st_dev, status.st_ino


def _expand(path: Any, ignored: Counter[str]) -> list[InputFile]:
    known = f"Expected one of: {', '.join(EXTENSIONS)}."
    if not path.exists():
        raise InputError(f"{path} does not exist: expected a file or directory to read.")
    if path.is_file():
        if extension(path) is None:
            if path.suffix.lower() == ".arrow":
                known = f"Of a saved dataset, {SAVED_DATASET}"
            raise InputError(f"{path} does not have a supported extension. {known}")
        return [InputFile(path, path.name)]
    files: list[InputFile] = []
    for name, file in _walk(path, "", {_identity(path)}):
        if extension(file) is None:
            ignored[file.suffix.lower() or "without extension"] += 1
        elif is_remote(file) or file.is_file():
            files.append(InputFile(file, name))
        else:
            raise InputError(f"{file} is a broken link or a special file: remove or fix it.")
    if not files:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(ignored.items()))
        others = f" It has {counts}." if counts else ""
        raise InputError(f"{path} contains no file that can be read. {known}{others}")
    return sorted(files, key=lambda file: file.name)


def _walk(directory: Any, prefix: str, seen: set[object]) -> Iterator[tuple[str, Any]]:
    """Yield the files below a directory with their names in it, except hidden ones.

    Each directory is visited once, whatever links to it; finished corpora are not.
    """
    try:
        entries = sorted(_entries(directory))
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror or error}.") from error
    names = {name for name, _ in entries}
    if "corpus.json" in names:
        return
    if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names:
        raise InputError(f"{directory} is a saved dataset: {SAVED_DATASET}")
    subdirectories = list[str]()
    for name, is_directory in entries:
        path = directory / name
        if name.startswith("."):
            continue
        if not is_directory:
            yield f"{prefix}{name}", path
        elif (identity := _identity(path)) not in seen:
            seen.add(identity)
            subdirectories.append(name)
    for name in subdirectories:
        yield from _walk(directory / name, f"{prefix}{name}/", seen)


def _entries(directory: Any) -> Iterator[tuple[str, bool]]:
    """Yield the names in a directory, and whether they are directories."""
    if not is_remote(directory):
        yield from ((path.name, path.is_dir()) for path in directory.iterdir())
        return
    own = directory.path.rstrip("/")
    for entry in directory.fs.ls(own, detail=True):
        name = entry["name"].rstrip("/")
        # A store may have a mark of the directory itself.
        if name != own:
            yield name.rpartition("/")[2], entry["type"] == "directory"
