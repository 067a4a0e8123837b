"""Hugging Face datasets as a stream of documents, from the Hub or from a local copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, SeenIds, document_or_bad
from prismlm.errors import BadRow, InputError, PrismError, check_text, first_line
from prismlm.hub import silence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        """Read ``NAME[:CONFIG]``; what exists as a path is a name.

        Raises:
            InputError: a configuration is named twice.
        """
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


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the stream of a dataset, to go on from.

    Attributes:
        row: how many rows were read.
        characters: how many characters of text they held.
        left_out: how many of them were left out, by the reason.
        state: the place as ``datasets`` notes it, which skips files that were read; None: it is
            found by counting rows.
    """

    row: int = 0
    characters: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    state: dict[str, Any] | None = None


BEGINNING = Position()


class DatasetReader(DocumentReader):
    """A stream of a dataset's documents that can be read more than once; see DocumentReader.

    Attributes:
        row: how many rows the pass under way has read.

    Rows come one by one from the network or from mapped files: memory does not grow with them.
    How much there is to read is not known before.

    Raises:
        InputError: ``datasets`` is not installed, there is no such dataset, configuration or
            split; while iterating: what DocumentReader raises, or the network failed.
    """

    def __init__(
        self,
        dataset: HubDataset,
        columns: Columns | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        skip_bad_rows: bool | None = None,
        answered_chats: bool = False,
    ) -> None:
        self._prepare(columns, tokenizer, skip_bad_rows, answered_chats)
        self._dataset = dataset
        self._unread: Any = _open(dataset)
        self._rows = self._unread
        self.row = 0

    @property
    def num_rows(self) -> int | None:
        """How many rows the split holds, or None where neither it nor its card says so."""
        if hasattr(self._rows, "num_rows"):
            return int(self._rows.num_rows)
        splits = None if self._dataset.data_files else self._rows.info.splits
        found = splits.get(self._dataset.split) if splits else None
        return (found.num_examples or None) if found else None

    @property
    def share_read(self) -> float | None:
        """How many of the rows the pass under way has read, or None where that is not known."""
        return self.row / self.num_rows if self.num_rows else None

    def position(self) -> Position:
        """Return where the pass under way is: behind the document that it yielded last."""
        state = self._rows.state_dict() if hasattr(self._rows, "state_dict") else None
        return Position(self.row, self.bytes_read, dict(self.left_out), state)

    def documents_from(self, position: Position, seen: SeenIds) -> Iterator[Document]:
        """Yield the documents behind a position; ``seen`` holds the ids of those before it."""
        self.bytes_read = position.characters
        self.left_out.clear()
        self.left_out.update(position.left_out)
        return self._checked(self._placed(position), seen, yielded=position.row > 0)

    def _names(self) -> str:
        return f"the dataset {self._dataset}"

    def _placed(self, position: Position = BEGINNING) -> Iterator[tuple[Document | BadRow, str]]:
        # A dataset that was told where to start does so in every later pass: each has its own.
        self._rows, self._unread = self._unread or _open(self._dataset), None
        self.row = position.row
        own_source = self._dataset.label
        found: dict[str, str] | None = None
        try:
            rows = self._rows
            if position.state is not None:
                rows.load_state_dict(position.state)
            elif position.row:
                rows = rows.skip(position.row)
            for record in rows:
                self.row += 1
                place = f"{self._dataset} ({self._dataset.split}), row {self.row}"
                found = found or self._columns.resolve(record, place)
                values = {role: record[name] for role, name in found.items()}
                own_id = f"{own_source}:{self.row}"
                document = document_or_bad(values, place, own_id, own_source, self.tokenizer)
                self.bytes_read += len(document.text) if isinstance(document, Document) else 0
                yield document, place
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
    silent = None if files or saved.is_dir() else silence()
    if silent is not None:
        raise _unreachable(dataset, silent)
    try:
        if (saved / "state.json").is_file() or (saved / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(saved))
            return loaded[dataset.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(
            dataset.name, dataset.config, split=dataset.split, streaming=True, **files
        )
    except Exception as error:  # datasets raises a dozen unrelated types here
        raise _unreadable(dataset, error) from error


def _unreachable(dataset: HubDataset, reason: str) -> InputError:
    return InputError(
        f"the dataset {dataset} cannot be reached on the Hugging Face Hub ({reason}). Go on with "
        "the same command once it can be, or name a local directory or files."
    )


def _unreadable(dataset: HubDataset, error: Exception) -> InputError:
    reason = first_line(error)
    if isinstance(error, ConnectionError) or "Offline" in reason:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else "is there a network?"
        return _unreachable(dataset, f"{reason}; {why}")
    return InputError(
        f"the split {dataset.split!r} of the dataset {dataset} cannot be read ({reason}). Expected "
        "a name on the Hugging Face Hub, with :CONFIG if it has several, or a local directory."
    )
