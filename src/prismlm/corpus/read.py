"""Files, directories, datasets and the steps of a pipeline, as streams of checked documents."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from importlib import import_module
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
    extension,
    is_remote,
    read_rows,
)
from prismlm.corpus.layout import id_hash
from prismlm.errors import (
    BadRow,
    InputError,
    PrismError,
    check_kind,
    check_path,
    check_text,
    first_line,
)
from prismlm.files import address_of
from prismlm.hub import hub_error

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
# Names that the package datasets takes as a format of text or rows, not as a dataset.
FORMATS = ("arrow", "conll", "csv", "eval", "hdf5", "json", "lance", "pandas", "parquet", "text")
FORMATS += ("vortex", "webdataset", "xml")


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
        self._columns, self.tokenizer = columns or Columns(), tokenizer
        self._skip_bad_rows, self._answered_chats = skip_bad_rows, answered_chats
        self._share, self._used, self._seen, self._file = share, used, set[int](), ""
        # The columns of the last row, and which of them has each role.
        self._names: tuple[str, ...] | None = None
        self._resolved = dict[str, str]()
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
            self.done, document = row.done, self._read(row)
            if isinstance(document, str):
                self.left_out[document] += 1
            else:
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
        ids = np.sort(np.fromiter(self._seen, np.uint64, len(self._seen)))
        return np.setdiff1d(ids, np.array(self._used or (), np.uint64), assume_unique=True)

    def _rows(self) -> Iterator[Row]:
        (number, count), size, before = self._share, self.total or 0, 0
        for file in self.files:
            start = size * number // count - before
            # Files without bytes may come after the last byte.
            stop = math.inf if number == count - 1 else size * (number + 1) // count - before
            if start <= 0 < stop or (file.kind in DIVISIBLE and start < file.size and stop > 0):
                yield from read_rows(file, self._columns, start, stop)
            before += file.size

    def _read(self, row: Row) -> Document | str:
        """Return the document of a row, or why it is left out."""
        try:
            document = self._document(row)
            return self._reason(document, row.location) or document
        except BadRow as bad:
            if self._skip_bad_rows:
                return bad.reason
            skip = f", or {SKIP}" if self._skip_bad_rows is not None else ""
            raise InputError(f"{bad} Fix the row{skip}.") from bad

    def _document(self, row: Row) -> Document:
        """Return the document of a row, or raise BadRow."""
        values, location = self._values(row), row.location
        messages, marks, text, reason = None, None, values.get("text"), "not a chat"
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

    def _values(self, row: Row) -> dict[str, Any]:
        """Return the values of a row by role, or raise BadRow."""
        record = row.record
        if isinstance(record, BadRow):
            raise record
        if isinstance(record, str):
            return {"text": record}
        # Most rows have the columns of the row before.
        if (names := tuple(record)) != self._names:
            try:
                self._resolved = self._columns.resolve(names, row.location)
            except InputError as error:
                raise BadRow(str(error), "a column is missing") from error
            self._names = names
        return {role: record[name] for role, name in self._resolved.items()}

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
                raise repeated_id(location, f"the id {document.doc_id!r}")
            self._seen.add(key)
        return None


def repeated_id(location: str, name: str) -> BadRow:
    """Return the error for an id that was used before."""
    return BadRow(
        f"{location}: another document has {name} too. Ids must be unique: change one, choose "
        "another column with --id-column, or, if they are made of file names, name the directory "
        "above the files instead.",
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
        remote = address_of(path)
        if remote is None:
            return path
        if remote.startswith("file://"):
            return Path("/", remote.removeprefix("file://"))
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


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A split of a dataset.

    Attributes:
        name: its name on the Hub; a local directory of data files or of ``save_to_disk``; or the
            format of ``data_files``, such as ``json`` or ``parquet``.
        config: the name of a configuration; None is the default.
        split: which split.
        data_files: paths or patterns; only these files are read.
    """

    name: str
    config: str | None = None
    split: str = "train"
    data_files: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, split: str = "train", data_files: tuple[str, ...] = ()) -> HubDataset:
        """Parse ``NAME[:CONFIG]``, where NAME may be a path."""
        name, colon, suffix = check_text("the dataset", text).rpartition(":")
        if not colon or Path(text).exists():
            return cls(text, None, split, data_files)
        return cls(name, suffix, split, data_files)

    def __str__(self) -> str:
        return f"{self.name}:{self.config}" if self.config else self.name

    def absolute(self) -> HubDataset:
        """Return it with paths that do not depend on the current directory."""
        if self.data_files and self.name in FORMATS:
            files = (f if "://" in f else os.path.abspath(f) for f in self.data_files)
            return replace(self, data_files=tuple(files))
        # Files of a directory or of the Hub are relative to the dataset.
        name = os.path.abspath(self.name) if os.path.exists(self.name) else self.name
        return replace(self, name=name)

    def described(self) -> dict[str, Any]:
        """Return it as JSON values."""
        absolute = self.absolute()
        return {"dataset": asdict(absolute) | {"data_files": list(absolute.data_files)}}


class DatasetReader(DocumentReader):
    """A :class:`DocumentReader` of a dataset, which is streamed.

    ``total`` is None if neither the split nor its card says how many rows there are. Parts divide
    the files of a stream, and the rows of a dataset that was saved.
    """

    unit = "rows"

    def _open(self, inputs: Any) -> tuple[list[InputFile], int | None]:
        self._dataset: HubDataset = inputs
        self._records = _load(inputs)
        if self._is_stored:
            return [], int(self._records.num_rows)
        splits = None if inputs.data_files else self._records.info.splits
        split = splits.get(inputs.split) if splits else None
        return [], (split.num_examples or None) if split else None

    @property
    def _is_stored(self) -> bool:
        """Whether it has random access; others are streamed, file by file."""
        return hasattr(self._records, "num_rows")

    def default_parts(self) -> int:
        """Return the number of parts: one for each file of a stream."""
        if self._is_stored:
            return max(1, math.ceil(self._records.data.nbytes / PART_BYTES))
        return self._records.num_shards

    @property
    def name(self) -> str:
        """The dataset, for error messages."""
        return f"the dataset {self._dataset}"

    def _records_of_part(self) -> Iterator[tuple[str, Any]]:
        """Yield each record with its number, or those of its file and in its file."""
        (part, count), records = self._share, self._records
        size = records.num_rows if self._is_stored else records.num_shards
        mine = range(size * part // count, size * (part + 1) // count)
        if self._is_stored:
            rows = enumerate(records.select(mine), start=mine.start + 1)
            yield from ((str(number), record) for number, record in rows)
            return
        for file in mine:
            rows = records.shard(num_shards=size, index=file)
            prefix = f"{file + 1}:" if size > 1 else ""
            yield from ((f"{prefix}{n}", row) for n, row in enumerate(rows, start=1))

    def _rows(self) -> Iterator[Row]:
        dataset = self._dataset
        label = Path(dataset.name).name
        if len(dataset.data_files) == 1:
            label = Path(dataset.data_files[0]).name.partition(".")[0]
        try:
            for done, (number, record) in enumerate(self._records_of_part(), start=1):
                location = f"{dataset} ({dataset.split}), row {number}"
                if done == 1:  # all rows have the same columns
                    self._columns.resolve(record, location)
                yield Row(record, location, f"{label}:{number}", label, done)
        except PrismError:
            raise
        except Exception as error:  # network, Arrow, a dozen libraries
            raise _unreadable(dataset, error) from error


class PipelineReader(DocumentReader):
    """A :class:`DocumentReader` of the documents of datatrove that the steps before yield."""

    unit = "documents"

    def _open(self, inputs: Any) -> tuple[list[InputFile], int | None]:
        self._stream = inputs
        return [], None

    @property
    def name(self) -> str:
        """The input, for error messages."""
        return "the steps before"

    def _rows(self) -> Iterator[Row]:
        for done, document in enumerate(self._stream, start=1):
            record = {**document.metadata, "text": document.text, "id": document.id}
            source = Path(str(record.get("file_path", "datatrove"))).name
            yield Row(record, f"document {document.id}", document.id, source, done)


def _load(dataset: HubDataset) -> Any:
    try:
        datasets: Any = import_module("datasets")
    except ModuleNotFoundError as error:
        raise InputError(
            "reading a Hugging Face dataset needs the package datasets: "
            "pip install 'prismlm[datasets]'"
        ) from error
    path = Path(dataset.name)
    files = {"data_files": list(dataset.data_files)} if dataset.data_files else {}
    if path.is_file():
        raise InputError(
            f"{path} is a file: expected the name of a dataset on the Hugging Face Hub or a "
            "directory. Name files without --dataset."
        )
    try:
        if not files and not path.is_dir() and (reason := hub_error()):
            raise ConnectionError(reason)
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
            return loaded[dataset.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(
            dataset.name, dataset.config, split=dataset.split, streaming=True, **files
        )
    except Exception as error:  # datasets raises a dozen unrelated types here
        raise _unreadable(dataset, error) from error


def _unreadable(dataset: HubDataset, error: Exception) -> InputError:
    reason = first_line(error)
    if isinstance(error, ConnectionError) or "Offline" in reason:
        return InputError(
            f"the dataset {dataset} cannot be reached on the Hugging Face Hub ({reason}). Check "
            "the connection and unset HF_HUB_OFFLINE, or name a local directory or files."
        )
    return InputError(
        f"the split {dataset.split!r} of the dataset {dataset} cannot be read ({reason}). Expected "
        "a name on the Hugging Face Hub, with :CONFIG if it has several, or a local directory."
    )
