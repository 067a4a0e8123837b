"""The files of a lens, on a disk or in an object store.

A lens in a store is named by an address that fsspec reads, such as ``s3://bucket/lens``. Arrays
whose size grows with the corpus and the table of documents are read by ranges of bytes; the other
files are copied to a directory of this machine when they are first needed.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from prismlm import fingerprints
from prismlm.corpus.tables import RangedFile
from prismlm.errors import (
    FormatError,
    InputError,
    PrismError,
    StaleLensError,
    check_whole,
    first_line,
)
from prismlm.files import address_of, atomic_file
from prismlm.lens import layout

# The beginning of the names of files that are read by ranges.
ARRAYS = ("cells", "cell-keys", "cell-starts", "suffixes-order", "suffixes-tokens")
LARGE = (*ARRAYS, "cell-documents")
CACHE_VARIABLE, CACHE_MEGABYTES = "PRISMLM_LENS_CACHE_MB", "256"
# Files beyond so many bytes are compared with their digests by `inspect index` alone: a question
# reads little of cells and suffix arrays, and tables have checksums of their pages. 64 MiB take a
# tenth of a second.
COMPARED_BYTES = 2**26
# Requests at once, and the bytes in which an array describes itself.
REQUESTS, HEADER = 32, 2**12
# Bytes of a request for several ranges, and those between two ranges that it may read in vain,
# since another request takes longer.
MOST_AT_ONCE, GAP = 2**23, 2**16
# Seconds between comparisons of meta.json with the one that was opened.
COMPARED_EVERY = 2.0
# Bytes that an array is read in.
BLOCK = 2**17


def files_of(lens: Path | str | LensFiles) -> LensFiles:
    """Return the files of a lens by its path or address."""
    if isinstance(lens, LensFiles):
        return lens
    address = address_of(lens)
    return LensFiles(Path(lens)) if address is None else StoredFiles(address)


def file_identity(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is replaced or rewritten; None for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


class LensFiles:
    """The files of a lens on a disk.

    Attributes:
        path: the directory of the files that are not read by ranges.
        address: of the lens, for messages and results.
        name: of the lens.
        meta: once it is read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.address, self.name = path, str(path), path.resolve().name
        self.meta: layout.LensMeta | None = None
        self._opened = self.identity()

    def changed(self) -> bool:
        """Return whether ``meta.json`` was replaced or removed since it was read."""
        return self.identity() != self._opened

    def identity(self) -> object:
        """Return what changes when ``meta.json`` is replaced; None if it is missing."""
        return file_identity(self.path / layout.META_FILE)

    def read_meta(self) -> layout.LensMeta:
        """Read ``meta.json``, and compare the sizes of all files with it."""
        self._opened = self.identity()
        self.meta = layout.read_meta(self.path)
        return self.meta

    def has(self, name: str) -> bool:
        """Return whether a file exists."""
        return (self.path / name).is_file()

    def local(self, name: str) -> Path:
        """Return a file that is not read by ranges, on this machine."""
        return self.path / name

    def check(self, names: Collection[str] | None = None) -> None:
        """Compare files with their digests, if ``meta`` is read.

        Without ``names``, all are compared, otherwise those that sum to ``COMPARED_BYTES``.
        """
        files, left = {} if self.meta is None else self.meta.files, COMPARED_BYTES
        for name in files if names is None else names:
            size = files[name]["bytes"] if name in files else 0
            if self.meta is not None and (names is None or size <= left):
                left -= size
                self._compare(name, fingerprints.of_file(self.path / name))

    def _compare(self, name: str, digest: str) -> None:
        assert self.meta is not None
        if digest != self.meta.files.get(name, {}).get("digest"):
            raise FormatError(
                f"{self.address}/{name} is damaged or of another lens: its digest differs. "
                f"{layout.REBUILD}"
            )

    def check_local(self, command: str) -> None:
        """Raise InputError if a command needs a lens on a disk and this one is in a store."""

    def too_large(self, names: Collection[str]) -> str | None:
        """Return why files cannot be searched in many places; None if they can."""

    def arrays(self, *names: str) -> list[Any]:
        """Open arrays: memory-mapped, or as :class:`StoredArray`."""
        return [layout.open_array(self.path / name) for name in names]

    def table_file(self, name: str) -> Path | Callable[[], RangedFile]:
        """Return a file of a table as :class:`~prismlm.corpus.tables.ParquetTable` takes it."""
        return self.path / name


class StoredFiles(LensFiles):
    """The files of a lens in an object store.

    Attributes:
        requests, bytes_read: of files that are read by ranges, so far.
    """

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address, self.name, self.meta = address, address.rpartition("/")[2], None
        self._opened: object = None
        self.requests = self.bytes_read = 0
        # The blocks of arrays that were used last; several threads may use them.
        self._blocks: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        value = os.environ.get(CACHE_VARIABLE) or CACHE_MEGABYTES
        megabytes = int(value) if value.isdecimal() else value
        self._cache_bytes = check_whole(CACHE_VARIABLE, megabytes, 1) * 10**6
        self._lock = threading.Lock()
        # What the store says of each file, such as size, time or ETag; empty without the file.
        self._states: dict[str, dict[str, Any]] = {}
        self._compared = -COMPARED_EVERY
        # Botocore's limit of connections is lower.
        connections = {"config_kwargs": {"max_pool_connections": REQUESTS}}
        options = connections if address.startswith("s3") else {}
        try:
            self._fs, self._root = url_to_fs(address, **options)
        except (ImportError, ValueError) as error:
            raise InputError(
                f"{address} cannot be read ({first_line(error)}). Install the package of that "
                "store for fsspec, such as s3fs for s3:// or gcsfs for gs://."
            ) from error

    def identity(self) -> object:
        """As of local files; the store is asked at most every two seconds."""
        if time.monotonic() >= self._compared + COMPARED_EVERY:
            self._states[layout.META_FILE] = self._state(layout.META_FILE)
            self._compared = time.monotonic()
        return self._states[layout.META_FILE] or None

    def read_meta(self) -> layout.LensMeta:
        """As of local files; ``path`` is then the directory of copies of this very lens."""
        self._opened = self.identity()
        if not self._opened:
            raise InputError(f"there is no lens at {self.address}: no {layout.META_FILE} is there.")
        data = self._fetch(layout.META_FILE, 0, self._size(layout.META_FILE))
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.path = caches / "prismlm" / "lenses" / fingerprints.of_bytes(data)
        with atomic_file(self.path / layout.META_FILE) as temporary:
            temporary.write_bytes(data)
        self.meta = layout.read_meta(self.path, self.address, self._sizes)
        return self.meta

    def _sizes(self, names: Sequence[str]) -> list[int]:
        self._states |= zip(names, _pool().map(self._state, names), strict=True)
        return [self._size(name) for name in names]

    def has(self, name: str) -> bool:
        """As of local files."""
        return bool(self._states.get(name))

    def local(self, name: str) -> Path:
        """As of local files; it is copied as a whole, and compared with its digest."""
        assert self.meta is not None
        copy = self.path / name
        if not copy.is_file():
            with atomic_file(copy) as temporary:
                with self._errors(name):
                    self._fs.get_file(f"{self._root}/{name}", str(temporary))
                    if temporary.stat().st_size != self._size(name):
                        raise OSError("the copy is incomplete")
                if name in self.meta.files:  # names are rewritten
                    self._compare(name, fingerprints.of_file(temporary))
        return copy

    def check(self, names: Collection[str] | None = None) -> None:
        """Copy files, and compare them with their digests; without ``names``, all, copied anew."""
        assert self.meta is not None
        for name in self.meta.files if names is None else names:
            if not name.startswith(LARGE):
                if names is None:  # a copy may have been damaged since
                    (self.path / name).unlink(missing_ok=True)
                self.local(name)
            elif names is None:
                with self._errors(name), self._fs.open(f"{self._root}/{name}", "rb") as file:
                    digest = fingerprints.of_stream(file)
                self._compare(name, digest)

    def check_local(self, command: str) -> None:
        """Raise InputError, since a store has neither locks nor renames."""
        raise InputError(
            f"`prismlm {command}` needs a lens on a disk, and {self.address} is in a store: copy "
            f"it, give --lens DIR, and copy back {layout.PROTOTYPES_FILE}, then {layout.META_FILE}."
        )

    def too_large(self, names: Collection[str]) -> str | None:
        """As of local files; those of a store must fit into the cache, since steps take turns."""
        size, limit = sum(map(self._size, names)), self._cache_bytes // 2
        if size <= limit:
            return None
        return (
            f"it is in a store, where {size / 1e6:,.0f} MB are searched only if they fit into "
            f"half of the cache, {limit / 1e6:,.0f} MB: set {CACHE_VARIABLE}, or copy the lens "
            "to a disk"
        )

    def arrays(self, *names: str) -> list[Any]:
        """As of local files; small ones are copied and memory-mapped."""
        large = [name for name in names if name.startswith(ARRAYS)]
        stored = dict(zip(large, _pool().map(self._array, large), strict=True))
        return [
            stored[name] if name in stored else layout.open_array(self.local(name))
            for name in names
        ]

    def _array(self, name: str) -> StoredArray:
        header = self._fetch(name, 0, min(HEADER, self._size(name)))
        try:
            return StoredArray(partial(self._read, name), header)
        except ValueError as error:
            raise layout.damaged(f"{self.address}/{name}", error) from error

    def table_file(self, name: str) -> Path | Callable[[], RangedFile]:
        """As of local files."""
        return lambda: RangedFile(partial(self._read, name), self._size(name))

    def _read(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return ascending ranges of bytes of a file, those not in the cache fetched at once.

        Neighbours share a request. StaleLensError if the file has changed.
        """
        with self._lock:
            parts = {span: block for span in spans if (block := self._blocks.get((name, *span)))}
            for span in parts:
                self._blocks.move_to_end((name, *span))
        if not (missing := [span for span in spans if span not in parts]):
            return list(parts.values())
        requests = joined(missing)
        fetched = _pool().map(lambda of: self._fetch(name, of[0][0], of[-1][1]), requests)
        for request, data in zip(requests, fetched, strict=True):
            begin = request[0][0]
            parts |= {(first, last): data[first - begin : last - begin] for first, last in request}
        # Afterwards, as a file may be replaced meanwhile.
        changed = self._state(name) != self._states[name]
        with self._lock:
            if changed:
                self._blocks.clear()  # it may hold blocks of another file
                raise StaleLensError(layout.REPLACED.format(self.address))
            self._blocks.update({(name, *span): parts[span] for span in missing})
            excess = sum(map(len, self._blocks.values())) - self._cache_bytes
            while excess > 0:  # without blocks that were not used for the longest time
                excess -= len(self._blocks.popitem(last=False)[1])
        return [parts[span] for span in spans]

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        with self._errors(name):
            part = self._fs.cat_file(f"{self._root}/{name}", start=start, end=stop)
            if len(part) != stop - start:
                raise OSError(f"{len(part):,} of {stop - start:,} bytes came")
        self.requests += 1
        self.bytes_read += len(part)
        return part

    def _state(self, name: str) -> dict[str, Any]:
        path = f"{self._root}/{name}"
        with self._errors(name):
            self._fs.invalidate_cache(path)
            try:
                state = self._fs.info(path)
            except FileNotFoundError:
                return {}
        return {} if state.get("type") == "directory" else dict(state)

    def _size(self, name: str) -> int:
        return self._states[name].get("size") or 0

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn errors of the store into one that names the file."""
        try:
            yield
        except FileNotFoundError as error:
            raise StaleLensError(layout.REPLACED.format(self.address)) from error
        except Exception as error:  # each store has its own
            raise PrismError(
                f"{self.address}/{name} could not be read ({type(error).__name__}: "
                f"{first_line(error)}). Check the address, your access to the store and the "
                "network, and ask again; the lens itself is unchanged."
            ) from error


class StoredArray:
    """An array [n] in a file of a store: the part of ``np.memmap`` that readers of a lens use.

    It is read in blocks of whole elements, all blocks of one call at once. ``read`` returns
    ascending ranges of bytes, [first, last), of the file; ``header`` is its beginning, as
    ``np.save`` writes it.
    """

    def __init__(
        self, read: Callable[[Sequence[tuple[int, int]]], list[bytes]], header: bytes
    ) -> None:
        stream = io.BytesIO(header)
        np.lib.format.read_magic(stream)
        (self._rows,), _, self.dtype = np.lib.format.read_array_header_1_0(stream)
        self._read, self._offset = read, stream.tell()
        self._per_block = max(1, BLOCK // self.dtype.itemsize)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self._rows)
        number = start // self._per_block
        blocks = self._blocks(range(number, -(-stop // self._per_block)))
        whole = np.frombuffer(b"".join(block.data for block in blocks), self.dtype)
        first = number * self._per_block
        return whole[start - first : max(start, stop) - first]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return copies of elements, in the order of ``rows``, int64 [m]."""
        number, within = np.divmod(rows, self._per_block)
        order = np.argsort(number, kind="stable")
        distinct, first = np.unique(number[order], return_index=True)
        result, parts = np.empty(len(rows), self.dtype), np.split(order, first[1:])
        # ``put`` and ``take`` copy records whole, an index field by field.
        for block, chosen in zip(self._blocks(distinct.tolist()), parts, strict=False):
            result.put(chosen, block.take(within[chosen]))
        return result

    def searchsorted(self, values: np.ndarray) -> np.ndarray:
        """As of ``np.ndarray``, of values [m]: bisection over blocks for all, then within one."""
        low = np.zeros(len(values), np.int64)
        high = np.full(len(values), -(-self._rows // self._per_block))
        while (open_ := high - low > 1).any():
            middle = (low + high) // 2
            later = self.take(middle[open_] * self._per_block) < values[open_]
            low[open_] = np.where(later, middle[open_], low[open_])
            high[open_] = np.where(later, high[open_], middle[open_])
        result, numbers = low * self._per_block, np.unique(low[high > 0]).tolist()
        for number, block in zip(numbers, self._blocks(numbers), strict=True):
            here = low == number
            result[here] += block.searchsorted(values[here])
        return result

    def _blocks(self, numbers: Iterable[int]) -> list[np.ndarray]:
        size = self._per_block * self.dtype.itemsize
        end = self._offset + self._rows * self.dtype.itemsize
        starts = [self._offset + number * size for number in numbers]
        parts = self._read([(start, min(start + size, end)) for start in starts])
        return [np.frombuffer(part, self.dtype) for part in parts]


def joined(spans: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group ascending spans with few bytes between them into requests of 8 MiB."""
    groups = list[list[tuple[int, int]]]()
    for first, last in spans:
        if groups and first - groups[-1][-1][1] <= GAP and last - groups[-1][0][0] <= MOST_AT_ONCE:
            groups[-1].append((first, last))
        else:
            groups.append([(first, last)])
    return groups


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(REQUESTS, "lens")
