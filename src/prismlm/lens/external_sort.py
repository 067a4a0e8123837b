"""Sorting the suffixes of a file of tokens on disk, with infini-gram.

infini-gram (https://infini-gram.io, Apache-2.0) sorts pieces of a text in memory, some 30 bytes a
token, and merges their orders from disk, with the tokens in memory. Its program is called directly,
because its Python interface makes tokens itself and pastes paths into shell commands.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from prismlm.errors import PrismError
from prismlm.files import WAY_OUT, atomic_file, room_to_write
from prismlm.lens.layout import array_file

PACKAGE = "infini_gram"
# Tokens sorted at a time.
PIECE = 2**25
# Bytes of the next piece that a piece is sorted with. Suffixes that have more in common are in any
# order, so of sequences as long as this that are repeated, some occurrences may not be found.
OVERLAP = 100_000
TOKENS_AT_ONCE = 2**22
# Of the program's byte offsets, and of the indices that are stored.
INDEX = np.dtype("<u4")


def sort_on_disk(tokens: Path, order: Path) -> None:
    """Write the indices of the sorted suffixes of an array of tokens; nothing without infini-gram.

    Tokens are compared byte by byte, as big-endian numbers sort. On disk it takes 8 bytes a token,
    of which 4 remain.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return
    stored = np.load(tokens, mmap_mode="r")
    what, needed = f"the sorted tokens {order}", 2 * INDEX.itemsize * len(stored)
    with (
        room_to_write(what, order.parent, WAY_OUT, needed),
        TemporaryDirectory(prefix=".sort-", dir=order.parent) as work,
    ):
        offsets = _sort(Path(spec.origin).with_name("rust_indexing"), tokens, stored, Path(work))
        with atomic_file(order) as temporary, array_file(temporary, INDEX) as append:
            total = 0
            for begin in range(0, len(offsets), TOKENS_AT_ONCE):
                indices = offsets[begin : begin + TOKENS_AT_ONCE] // stored.itemsize
                total += int(indices.sum(dtype=np.int64))
                append(indices)
            # Threads of the program may fail, and it ends with status 0.
            if len(offsets) != len(stored) or total != len(stored) * (len(stored) - 1) // 2:
                raise _failure(order.parent, "its output is incomplete")


def _sort(program: Path, tokens: Path, stored: np.memmap, work: Path) -> np.ndarray:
    """Return the byte offsets of the sorted suffixes, memory-mapped."""
    begin, step = stored.offset, PIECE * stored.itemsize
    end = begin + stored.nbytes
    common = ["--ratio", INDEX.itemsize, "--token-width", stored.itemsize]
    common += ["--data-file", tokens.resolve(), "--parts-dir", "pieces"]
    (work / "pieces").mkdir()
    # The last piece is longer than the overlap, so that the one before has all of that.
    starts = range(begin, max(begin + 1, end - OVERLAP), step)
    for start in starts:
        stop = min(start + step + OVERLAP, end)
        _run([program, "make-part", *common, "--start-byte", start, "--end-byte", stop], work)
    output = work / "pieces" / f"{begin}-{end}"
    if len(starts) > 1:
        output = work / "merged" / "0000"
        output.parent.mkdir()
        how = ["--merged-dir", "merged", "--hacksize", OVERLAP, "--num-threads", 1]
        _run([program, "merge", *common, *how], work)
        for piece in (work / "pieces").iterdir():
            piece.unlink()
    size = output.stat().st_size if output.is_file() else 0
    # An empty file cannot be mapped; a broken last offset is missing.
    return np.memmap(output, INDEX, "r", shape=size // INDEX.itemsize) if size else np.empty(0)


def _run(command: list[object], work: Path) -> None:
    text = list(map(str, command))
    run = subprocess.run(text, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if run.returncode or b"panicked" in run.stderr:
        why = run.stderr.decode(errors="replace").strip() or f"exit status {run.returncode}"
        raise _failure(work.parent, why)


def _failure(directory: Path, why: str) -> PrismError:
    return PrismError(
        f"infini-gram could not sort tokens in {directory} ({why}). It needs memory for the "
        f"tokens, {30 * PIECE / 1e9:.1f} GB at least, and 8 bytes of disk for each: make room, and "
        "give the same command again."
    )
