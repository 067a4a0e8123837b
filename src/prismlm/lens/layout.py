"""The files of a lens directory: names, schemas, and the record of how it was built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.corpus.layout import FACTS, map_file, strings
from prismlm.errors import FormatError, InputError, check_path
from prismlm.files import address_of, from_json, read_json, write_json
from prismlm.layers import PrototypeHead

FORMAT_VERSION = 4
META_FILE = "meta.json"
INDEX_FILE, PROTOTYPES_FILE = "index.parquet", "prototypes.parquet"
# Positions by cell and next token; the key and the first row of each such range.
CELLS_FILE = "cells.npy"
CELL_KEYS_FILE, CELL_STARTS_FILE = "cell-keys.npy", "cell-starts.npy"
CELL_FILES = (CELLS_FILE, CELL_KEYS_FILE, CELL_STARTS_FILE)
# In a lens with several ranges of cells: the positions of each cell and of each next token.
COUNT_FILES = ("cell-sizes.npy", "token-counts.npy")
CELL_CENTRES_FILE = "cell-centres.npy"
CELL_DOCUMENTS_FILE = "cell-documents.parquet"
# In the metadata of prototypes.parquet.
KEY = b"lens"
GROUP_COLUMNS = ("source", "domain", "license")
REBUILD = "Build the lens again: `prismlm index MODEL --corpus DIR --overwrite`."
COPY = "Copy the lens again, or wait until the store lists all of it."
REPLACED = "the lens {} was rebuilt or removed since it was opened: open the model again."


def _columns(kind: pa.DataType, *names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, kind) for name in names]


INDEX_SCHEMA = pa.schema(
    [
        *_columns(pa.int32(), "prototype", "rank"),
        *_columns(pa.float32(), "cosine", "activation"),
        ("routed", pa.bool_()),
        ("position", pa.int64()),
        *FACTS,
        *strings("before", "token", "after"),
    ]
)
PROTOTYPES_SCHEMA = pa.schema(
    [
        ("prototype", pa.int32()),
        *strings("name", "description", "category", "role"),
        *_columns(pa.list_(pa.string()), "tags", "top_tokens"),
        ("top_values", pa.list_(pa.float32())),
        ("usage", pa.float64()),
        *_columns(pa.float32(), "nearest_cosine", "x", "y"),
        ("label_source", pa.string()),
        ("label_score", pa.float32()),
    ]
)
TrainedOn = bool | Literal["fine-tuned"] | None


@dataclass(frozen=True)
class LensMeta:
    """How a lens was built; the first three are fingerprints, the model has a probe instead."""

    prototypes: str
    tokenizer: str
    corpus: str
    corpus_name: str
    corpus_path: str  # at that time
    split: str
    trained_on: TrainedOn  # whether on this corpus; "fine-tuned" if on another one before
    window: int
    stride: int
    contexts: int
    documents: int
    tokens: int  # predicted in these documents, or in the sample of their windows
    with_text: bool
    cells: dict[str, Any]
    precision: str | None = None  # of the passes: float32, which is the model's own, or bf16
    support: dict[str, Any] | None = None
    labels: dict[str, Any] | None = None
    map: dict[str, Any] | None = None
    # The mean nearest cosine at shares of the corpus.
    convergence: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    # The size and digest of every file that is written once.
    files: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def share_read(self) -> float:
        """The share of the windows that were read (``--positions``)."""
        return float(self.cells["share"])

    def size(self, shown: Callable[[int], str] = "{:,}".format) -> str:
        """Say how many tokens of how many documents were read, and whether they are a sample."""
        of = "sampled from" if self.sampled else "of"
        return f"{shown(self.tokens)} tokens {of} {shown(self.documents)} documents"

    @property
    def sampled(self) -> bool:
        """Whether only some windows were read."""
        return self.share_read < 1


def trained_on_words(trained_on: TrainedOn, split: str) -> str:
    """Say whether a model was trained on the documents of its lens."""
    if trained_on is None:
        return "not known"
    if not trained_on:
        return "no"
    if trained_on == "fine-tuned" and split != "heldout":
        return "yes, by fine-tuning; its earlier training text is not in this lens"
    return {"train": "yes", "heldout": "no, held out"}.get(split, "yes, except held-out documents")


def prototypes_fingerprint(head: PrototypeHead) -> str:
    """Fingerprint what a lens depends on of a head: prototypes, k, τ, and fitted weights."""
    parts = [
        fingerprints.of_tensor(head.prototypes.detach().float()),
        head.prototypes_per_token,
        round(float(head.scale.detach()), 6),
    ]
    # Unchanged for cosine weights, which older lenses all have.
    return fingerprints.of_json(parts if head.weights == "cosine" else [*parts, "pursued"])


def write_meta(directory: Path, meta: LensMeta) -> None:
    """Write ``meta.json``, with its own digest."""
    value = {"format_version": FORMAT_VERSION, "prismlm": prismlm.__version__, **asdict(meta)}
    write_json(directory / META_FILE, value | {"digest": fingerprints.of_json(value)})


def read_meta(
    directory: Path,
    address: str | None = None,
    sizes_of: Callable[[Sequence[str]], list[int]] | None = None,
) -> LensMeta:
    """Read ``meta.json``, and compare the sizes of all files with it; FormatError if damaged.

    The other files may be at another ``address``, with sizes that ``sizes_of`` returns.
    """
    path, where = directory / META_FILE, address or str(directory)
    if not path.is_file():
        raise FormatError(f"{where} is not a lens: it has no {META_FILE}.")
    value = read_json(path)
    if not isinstance(value, dict) or value.get("format_version") != FORMAT_VERSION:
        raise FormatError(f"{where} has another lens format. {REBUILD}")
    if value.pop("digest", None) != fingerprints.of_json(value):
        raise FormatError(f"{where}/{META_FILE} was changed since it was written. {REBUILD}")
    del value["format_version"], value["prismlm"]
    meta = from_json(LensMeta, value, f"{where}/{META_FILE}")
    expected = {name: file["bytes"] for name, file in meta.files.items()}
    names = [*expected, PROTOTYPES_FILE]
    paths = (directory / name for name in names)
    sizes = sizes_of(names) if sizes_of else [p.stat().st_size if p.is_file() else 0 for p in paths]
    for name, size in zip(names, sizes, strict=True):
        if not size or size != expected.get(name, size):
            raise FormatError(
                f"{where}/{name} has {size} bytes, expected {expected.get(name, 'more')}: it is "
                f"missing, truncated or changed. {REBUILD if address is None else COPY}"
            )
    return meta


def describe_files(
    directory: Path, known: Mapping[str, dict[str, Any]] | None = None
) -> dict[str, dict[str, Any]]:
    """Return the size and digest of the files that are written once; ``known`` are not read."""
    known = known or {}
    return {
        path.name: known.get(path.name)
        or {"bytes": path.stat().st_size, "digest": fingerprints.of_file(path)}
        for path in sorted(directory.iterdir())
        if path.name not in (META_FILE, PROTOTYPES_FILE)
    }


def key_of(files: dict[str, dict[str, Any]]) -> str:
    """Return a digest of the files of a lens, by which names and audits belong to it."""
    return fingerprints.of_json(files)


def read_table(path: Path) -> pa.Table:
    """Read a table of a lens."""
    try:
        return pq.read_table(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def open_array(path: Path) -> np.ndarray:
    """Memory-map an array, as :func:`map_file` does."""
    try:
        data = map_file(path, np.dtype("u1"))
        file = pa.BufferReader(data)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return data[file.tell() :].view(dtype).reshape(shape)
    except Exception as error:  # numpy raises half a dozen unrelated types here
        raise damaged(path, error) from error


def damaged(path: Path | str, why: object) -> FormatError:
    """Return the error for a file that cannot be read."""
    return FormatError(f"{path} is damaged ({why}). Build again what it belongs to.")


def numbered(name: str, number: int | None) -> str:
    """Return the name of one of several files; None for a single one."""
    return name if number is None else name.replace(".", f"-{number:05d}.")


def file_names(names: Sequence[str], count: int) -> list[str]:
    """Return the names of ``count`` files of each kind, number by number."""
    numbers = range(count) if count > 1 else [None]
    return [numbered(name, number) for number in numbers for name in names]


@contextmanager
def array_file(path: Path, dtype: np.dtype) -> Iterator[Callable[[np.ndarray], object]]:
    """Yield a function that appends to a file of one array [n].

    It writes instead of memory-mapping, so that a full disk raises an error.
    """
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, described | {"shape": (0,)})
        first = file.tell()
        yield lambda part: file.write(np.ascontiguousarray(part, dtype).view(np.uint8).data)
        rows = (file.tell() - first) // dtype.itemsize
        # A header has room for the digits of any length.
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, described | {"shape": (rows,)})


def write_prototypes(table: pa.Table, path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write ``prototypes.parquet`` of the lens that has these other files."""
    write_table(table.replace_schema_metadata({KEY: key_of(files)}), path)


def read_prototypes(directory: Path, meta: LensMeta) -> pa.Table:
    """Read ``prototypes.parquet``, which belongs to a lens by its key since it is rewritten."""
    path = directory / PROTOTYPES_FILE
    table = read_table(path)
    if (table.schema.metadata or {}).get(KEY) != key_of(meta.files).encode():
        raise FormatError(f"{path} is of another lens: put its own back. {REBUILD}")
    return table


def write_table(table: pa.Table, path: Path) -> None:
    """Write a table of a lens, with checksums of its pages."""
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)


def find_lens(model_directory: Path, lens: Path | str | None) -> Path | str | None:
    """Return the lens with a name or path, or by default the only one of the model.

    An address in a store is returned as text.

    Raises:
        InputError: there are several lenses and no name, or it does not exist.
    """
    if lens is None:
        # Hidden ones are still being written.
        lenses = sorted(path for path in (model_directory / "lens").glob("[!.]*") if path.is_dir())
        if len(lenses) > 1:
            names = ", ".join(path.name for path in lenses)
            raise InputError(
                f"{model_directory} has several lenses ({names}): choose one with --lens."
            )
        return lenses[0] if lenses else None
    if address := address_of(lens):
        return address
    named = check_path("the lens", lens)
    found = [path for path in (named, model_directory / "lens" / named) if path.is_dir()]
    if not found:
        raise InputError(f"there is no lens {lens}. Build it with `prismlm index`.")
    # A lens has the name of its corpus, which may be a directory right here.
    return max(found, key=lambda path: (path / META_FILE).is_file())
