"""Hugging Face datasets as a stream of documents, from the Hub or from a local copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, make_document
from prismlm.errors import InputError


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A split of a dataset.

    Attributes:
        name: its name on the Hub, or a local directory: of data files, or of ``save_to_disk``.
        config: which of its configurations; None is the default one.
        split: which split.
    """

    name: str
    config: str | None = None
    split: str = "train"

    @classmethod
    def parse(cls, text: str, split: str = "train") -> HubDataset:
        """Read ``NAME[:CONFIG]``; what exists as a path is a name."""
        name, colon, config = text.rpartition(":")
        if not colon or Path(text).exists():
            return cls(text, None, split)
        return cls(name, config, split)

    def __str__(self) -> str:
        return f"{self.name}:{self.config}" if self.config else self.name


class DatasetReader(DocumentReader):
    """A stream of a dataset's documents that can be read more than once; see DocumentReader.

    Rows come one by one from the network or from mapped files: memory does not grow with them.
    How much there is to read is not known before.

    Raises:
        InputError: ``datasets`` is not installed, there is no such dataset, configuration or
            split; while iterating: what DocumentReader raises, or the network failed.
    """

    def __init__(self, dataset: HubDataset, columns: Columns | None = None) -> None:
        self.files = []
        self.total_bytes = self.bytes_read = self.skipped = 0
        self._columns = columns or Columns()
        self._dataset = dataset
        self._rows = _open(dataset)

    def _names(self) -> str:
        return f"the dataset {self._dataset}"

    def _placed(self) -> Iterator[tuple[Document, str]]:
        own_source = Path(self._dataset.name).name
        found: dict[str, str] | None = None
        try:
            for number, record in enumerate(self._rows, start=1):
                place = f"{self._dataset} ({self._dataset.split}), row {number}"
                found = found or self._columns.resolve(record, place)
                values = {role: record[name] for role, name in found.items()}
                document = make_document(values, place, f"{own_source}:{number}", own_source)
                self.bytes_read += len(document.text)
                yield document, place
        except (OSError, RuntimeError) as error:
            raise _unreadable(self._dataset, error) from error


def _open(dataset: HubDataset) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise InputError(
            "reading a Hugging Face dataset needs the package datasets: "
            "pip install 'prismlm[datasets]'"
        ) from error
    saved = Path(dataset.name)
    try:
        if (saved / "state.json").is_file() or (saved / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(saved))
            return loaded[dataset.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(
            dataset.name, dataset.config, split=dataset.split, streaming=True
        )
    except Exception as error:  # datasets raises a dozen unrelated types here
        raise _unreadable(dataset, error) from error


def _unreadable(dataset: HubDataset, error: Exception) -> InputError:
    lines = str(error).strip().splitlines()
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    return InputError(
        f"the split {dataset.split!r} of the dataset {dataset} cannot be read ({reason}). Expected "
        "a name on the Hugging Face Hub, with :CONFIG if it has several, or a local directory."
    )
