"""Files, directories, datasets and the steps of a pipeline, as streams of checked documents."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prismlm.corpus.chat import ASSISTANT, as_messages, check_messages, is_messages, render_chat
from prismlm.corpus.documents import MESSAGES, METADATA, Columns, Document, as_metadata
from prismlm.corpus.formats import (
    DIVISIBLE,
    EXPECTED,
    InputFile,
    Row,
    extension,
    is_remote,
    read_rows,
)
from prismlm.errors import (
    BadRow,
    InputError,
    PrismError,
    check_path,
    check_text,
    first_line,
    shown,
)
from prismlm.files import address_of
from prismlm.hub import hub_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Reasons to leave out a valid row.
NO_TEXT, NO_ANSWER = "no text", "chat without an answer"
SKIP = "leave out and count such rows with --skip-bad-rows (in Python: skip_bad_rows=True)"

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | InputFile]
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
        total, done: the size of what is read, and how much of it this pass has read, in ``unit``.
        left_out: how many documents this pass has left out, by reason.
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
        used: ids that count as used before; None: ids may be used again.
        reason: returns why to leave out a document, or None; its arguments are the document and
            its number among those with text, from 0.
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
        used: Collection[str] | None = (),
        reason: Callable[[Document, int], str | None] = lambda document, number: None,
    ) -> None:
        self._columns, self.tokenizer = columns or Columns(), tokenizer
        self._skip_bad_rows, self._answered_chats = skip_bad_rows, answered_chats
        self._share, self._used, self._filter = share, used, reason
        # The columns of the last row, and which of them has each role.
        self._names: tuple[str, ...] | None = None
        self._resolved = dict[str, str]()
        self.ignored, self.left_out = Counter[str](), Counter[str]()
        self.done = 0
        self.files, self.total = self._open(paths)

    def _open(self, inputs: Any) -> tuple[list[InputFile], int | None]:
        """Return the files to read, and ``total``."""
        paths: Any = [inputs]
        if not isinstance(inputs, (str, os.PathLike)) and not is_remote(inputs):
            paths = inputs
        # A file with several names or links is read once.
        distinct: dict[str, InputFile] = {}
        for one in paths:
            files = [one] if isinstance(one, InputFile) else _expand(_located(one), self.ignored)
            for file in files:
                distinct.setdefault(_identity(file.path), file)
        if not distinct:
            raise InputError("No input was named: give files or directories to read.")
        self._name = ", ".join(str(file.path) for file in [*distinct.values()][:3])
        return [*distinct.values()], sum(file.size for file in distinct.values())

    def default_parts(self) -> int:
        """Return the number of parts that a build divides this input into."""
        return max(1, math.ceil((self.total or 0) / PART_BYTES))

    def __iter__(self) -> Iterator[Document]:
        self.done, self._number, seen = 0, 0, {*(self._used or ())}
        self.left_out.clear()
        for row in self._rows():
            self.done = row.done
            try:
                document = self._document(row)
                reason = self._reason(document)
                if reason is None and self._used is not None:
                    if document.doc_id in seen:
                        raise repeated_id(row.location, document.doc_id)
                    seen.add(document.doc_id)
            except BadRow as bad:
                if not self._skip_bad_rows:
                    skip = f", or {SKIP}" if self._skip_bad_rows is not None else ""
                    raise InputError(f"{bad} Fix the row{skip}.") from bad
                reason, document = bad.reason, None
            if reason is not None:
                self.left_out[reason] += 1
            elif document is not None:
                yield document
        # Of several parts, some may be empty.
        if not self._number and self._share[1] == 1:
            left_out = f" Left out: {count_list(self.left_out)}." if self.left_out else ""
            raise InputError(f"No documents: no text in {self._name}.{left_out}")

    def _rows(self) -> Iterator[Row]:
        (number, count), size, before = self._share, self.total or 0, 0
        for file in self.files:
            start = size * number // count - before
            # Files without bytes may come after the last byte.
            stop = math.inf if number == count - 1 else size * (number + 1) // count - before
            if start <= 0 < stop or (file.kind in DIVISIBLE and start < file.size and stop > 0):
                yield from read_rows(file, self._columns, start, stop)
            before += file.size

    def _document(self, row: Row) -> Document:
        """Return the document of a row, or raise BadRow."""
        values, location = self._values(row), row.location
        messages, marks, text = None, None, values.get("text")
        # A named text column may hold chats as well.
        is_chat = MESSAGES in values or is_messages(text)
        tokenizer = self._with_template(location) if is_chat else None
        reason = "not a chat"
        try:
            if tokenizer is not None:
                messages = as_messages(values.get(MESSAGES, text))
                check_messages(messages, location)
                reason = "chat that the template refuses"
                text, marks = render_chat(tokenizer, messages)
            reason = "text is not a string"
            if not isinstance(text, str):
                raise InputError(f"{location}: the text is {shown(text)}, expected a string.")
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

    def _reason(self, document: Document) -> str | None:
        """Return why a document is left out, or None."""
        if not document.text or document.text.isspace():
            return NO_TEXT
        if self._answered_chats and document.messages is not None:
            answers = document.messages[-1 if self._answered_chats == "last" else 0 :]
            if all(one["role"] != ASSISTANT for one in answers):
                return NO_ANSWER
        self._number += 1
        return self._filter(document, self._number - 1)


def repeated_id(location: str, doc_id: str) -> BadRow:
    """Return the error for an id that was used before."""
    return BadRow(
        f"{location}: another document has the id {doc_id!r} too. Ids must be unique: change one, "
        "choose another column with --id-column, or, if they are made of file names, name the "
        "directory above the files instead.",
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


def _identity(path: Any) -> str:
    return str(path) if is_remote(path) else os.path.realpath(path)


def _expand(path: Any, ignored: Counter[str]) -> list[InputFile]:
    if not path.exists():
        raise InputError(f"{path} does not exist: expected a file or directory to read.")
    if path.is_file():
        return [InputFile.of(path)]
    files: list[InputFile] = []
    try:
        for name, file in _walk(path, "", {_identity(path)}):
            if extension(file) is None:
                ignored[file.suffix.lower() or "without extension"] += 1
            else:
                files.append(InputFile.of(file, name))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error}).") from error
    if not files:
        others = f" It has: {count_list(ignored)}." if ignored else ""
        raise InputError(f"{path} contains no file that can be read. {EXPECTED}{others}")
    return sorted(files, key=lambda file: file.name)


def _walk(directory: Any, prefix: str, seen: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the files below a directory with their names in it, except hidden ones.

    Each directory is visited once, whatever links to it; finished corpora are not.
    """
    names = dict(sorted(_entries(directory)))
    if "corpus.json" in names:
        return
    if "dataset_dict.json" in names or {"state.json", "dataset_info.json"} <= names.keys():
        raise InputError(
            f"{directory} is a saved dataset: `corpus build` takes it as --dataset DIR (in Python: "
            "HubDataset); for other commands write it as Parquet (Dataset.to_parquet)."
        )
    for name, is_directory in names.items():
        path = directory / name
        if name.startswith("."):
            continue
        if not is_directory:
            yield f"{prefix}{name}", path
        elif (identity := _identity(path)) not in seen:
            seen.add(identity)
            yield from _walk(path, f"{prefix}{name}/", seen)


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
        self._name = f"the dataset {inputs}"
        self._records = _load(inputs)
        # One that was saved has random access; others are streamed, file by file.
        self._is_saved = hasattr(self._records, "num_rows")
        if self._is_saved:
            return [], int(self._records.num_rows)
        splits = None if inputs.data_files else self._records.info.splits
        split = splits.get(inputs.split) if splits else None
        return [], (split.num_examples or None) if split else None

    def default_parts(self) -> int:
        """Return the number of parts: one for each file of a stream."""
        if self._is_saved:
            return max(1, math.ceil(self._records.data.nbytes / PART_BYTES))
        return self._records.num_shards

    def _records_of_part(self) -> Iterator[tuple[str, Any]]:
        """Yield each record with its number, or those of its file and in its file."""
        (part, count), records = self._share, self._records
        size = records.num_rows if self._is_saved else records.num_shards
        mine = range(size * part // count, size * (part + 1) // count)
        if self._is_saved:
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
        self._stream, self._name = inputs, "the steps before"
        return [], None

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
    if dataset.name in FORMATS and not files:
        # datasets would read the current directory, even next to a directory of this name.
        raise InputError(
            f"{dataset.name!r} is a format: name files by --data-files (in Python: data_files), or "
            f"a directory as ./{dataset.name}."
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
    return InputError(
        f"the split {dataset.split!r} of the dataset {dataset} cannot be read "
        f"({first_line(error)}). Expected a name on the Hugging Face Hub, which must be reachable "
        "(HF_HUB_OFFLINE unset), with :CONFIG if it has several; or a local directory."
    )
