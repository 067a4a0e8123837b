"""Hugging Face datasets as a stream of documents, from the Hub or from a local copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from prismlm.corpus.documents import Columns
from prismlm.corpus.read import DocumentReader, InputFile, Placed, document_or_bad
from prismlm.errors import InputError, PrismError, check_text, first_line
from prismlm.hub import silence


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A split of a dataset.

    Attributes:
        name: its name on the Hub, or a local directory: of data files, or of ``save_to_disk``; or
            a file format, such as ``json`` or ``parquet``, of ``data_files``.
        config: which of its configurations; None is the default one.
        split: which split.
        data_files: only these files of it: paths or patterns.
    """

    name: str
    config: str | None = None
    split: str = "train"
    data_files: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        text: str,
        split: str = "train",
        config: str | None = None,
        data_files: tuple[str, ...] = (),
    ) -> HubDataset:
        """Read ``NAME[:CONFIG]``; what exists as a path is a name."""
        name, colon, named = check_text("the dataset", text).rpartition(":")
        if not colon or Path(text).exists():
            return cls(text, config, split, data_files)
        if config is not None:
            raise InputError(
                f"the dataset {text} and the configuration {config}: name one configuration."
            )
        return cls(name, named, split, data_files)

    def __str__(self) -> str:
        return f"{self.name}:{self.config}" if self.config else self.name

    @property
    def label(self) -> str:
        """What its documents are called without ids of their own: the last part of its name."""
        if len(self.data_files) == 1:
            return Path(self.data_files[0]).name.partition(".")[0]
        return Path(self.name).name

    def origin(self, columns: Columns | None) -> dict[str, Any]:
        """Return, for ``corpus.json``, which rows and columns are read."""
        local = Path(self.name)
        named = columns or Columns()
        roles = {role: getattr(named, role) for role in named.__slots__}
        return {
            "dataset": str(local.resolve()) if local.exists() else self.name,
            "config": self.config,
            "split": self.split,
            "data_files": [f if "://" in f else os.path.abspath(f) for f in self.data_files],
            "columns": {role: name for role, name in roles.items() if name is not None},
        }


class DatasetReader(DocumentReader):
    """A stream of a dataset's documents that can be read more than once; see DocumentReader.

    Rows come one by one from the network or from mapped files: memory does not grow with them.
    ``total`` is None where neither the split nor its card says how many rows it has.
    """

    unit = "rows"

    def _find(self, paths: Any) -> tuple[list[InputFile], int | None]:
        self._dataset: HubDataset = paths
        self._rows = _open(paths)
        if hasattr(self._rows, "num_rows"):
            return [], int(self._rows.num_rows)
        splits = None if paths.data_files else self._rows.info.splits
        split = splits.get(paths.split) if splits else None
        return [], (split.num_examples or None) if split else None

    @property
    def name(self) -> str:
        """The dataset, as errors name it."""
        return f"the dataset {self._dataset}"

    def _placed(self) -> Iterator[Placed]:
        own = self._dataset.label
        found: dict[str, str] = {}
        try:
            for number, record in enumerate(self._rows, start=1):
                self.done = number
                place = f"{self._dataset} ({self._dataset.split}), row {number}"
                found = found or self._columns.resolve(record, place)
                values = {role: record[name] for role, name in found.items()}
                yield document_or_bad(values, place, f"{own}:{number}", own, self.tokenizer), place
        except PrismError:
            raise
        except Exception as error:  # of the network, of Arrow, of a dozen libraries
            raise _unreadable(self._dataset, error) from error


def _open(dataset: HubDataset) -> Any:
    try:
        datasets: Any = import_module("datasets")
    except ModuleNotFoundError as error:
        raise InputError(
            "reading a Hugging Face dataset needs the package datasets: "
            "pip install 'prismlm[datasets]'"
        ) from error
    saved = Path(dataset.name)
    files = {"data_files": list(dataset.data_files)} if dataset.data_files else {}
    if saved.is_file():
        raise InputError(
            f"{saved} is a file: expected the name of a dataset on the Hugging Face Hub or a "
            "directory. Files are read by the command itself, without --dataset."
        )
    try:
        if not files and not saved.is_dir() and (silent := silence()):
            raise ConnectionError(silent)
        if (saved / "state.json").is_file() or (saved / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(saved))
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
            f"the dataset {dataset} cannot be reached on the Hugging Face Hub ({reason}). Run the "
            "command again once it can be, without HF_HUB_OFFLINE, or name a local directory or "
            "files."
        )
    return InputError(
        f"the split {dataset.split!r} of the dataset {dataset} cannot be read ({reason}). Expected "
        "a name on the Hugging Face Hub, with :CONFIG if it has several, or a local directory."
    )
