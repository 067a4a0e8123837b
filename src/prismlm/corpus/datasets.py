"""Hugging Face datasets as a stream of documents, from the Hub or from a local copy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from prismlm.corpus.formats import InputFile, Row
from prismlm.corpus.read import PART_BYTES, DocumentReader
from prismlm.errors import InputError, PrismError, check_text, first_line
from prismlm.hub import hub_error

# Names that the package datasets takes as a format of text or rows, not as a dataset.
FORMATS = ("arrow", "conll", "csv", "eval", "hdf5", "json", "lance", "pandas", "parquet", "text")
FORMATS += ("vortex", "webdataset", "xml")


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

    @property
    def label(self) -> str:
        """The default source of its documents, and the first part of their ids."""
        if len(self.data_files) == 1:
            return Path(self.data_files[0]).name.partition(".")[0]
        return Path(self.name).name

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
        label = self._dataset.label
        names: dict[str, str] = {}
        try:
            for done, (number, record) in enumerate(self._records_of_part(), start=1):
                location = f"{self._dataset} ({self._dataset.split}), row {number}"
                names = names or self._columns.resolve(record, location)
                values = {role: record[name] for role, name in names.items()}
                yield Row(values, location, f"{label}:{number}", label, done)
        except PrismError:
            raise
        except Exception as error:  # network, Arrow, a dozen libraries
            raise _unreadable(self._dataset, error) from error


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
            location = f"document {document.id}"
            record = {**document.metadata, "text": document.text, "id": document.id}
            names = self._columns.resolve(record, location)
            values = {role: record[name] for role, name in names.items()}
            source = Path(str(record.get("file_path", "datatrove"))).name
            yield Row(values, location, document.id, source, done)


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
