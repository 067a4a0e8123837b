"""Writing so that nothing is ever half-written: a temporary sibling, then one rename."""

from __future__ import annotations

import codecs
import glob
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prismlm.errors import BadRow, FormatError, InputError, PrismError, shown

# What torch.save says, as a RuntimeError, of a write that failed.
FAILED_WRITE = re.compile("PytorchStreamWriter|inline_container")
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.(tmp|old)$")
ASIDE = ".old"
WAY_OUT = "Make room, and give the same command again."
PRIVATE = stat.S_IRUSR | stat.S_IWUSR
# Bytes of one text, or of the line that it is in.
LARGEST_TEXT = 2**27
SURROGATE = re.compile("[\ud800-\udfff]")
# Of the numbers in a file: what does not fit 63 bits, NaN among it, is none of ours.
LARGEST = 2**63
T = TypeVar("T")


def temporary_sibling(path: Path) -> Path:
    """Return a hidden name beside ``path``, of which nothing has been made yet."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def remove_left_behind(path: Path, *, within: bool = False) -> None:
    """Remove the temporary siblings that a killed process left of ``path``, or of all within it.

    Within a directory, they are looked for in it and in those it holds: what lies deeper, such as
    in a lens, may be another's work. A directory that was moved aside, where the kill came before
    the new one took its place, is moved back. To be called by whoever holds the lock on it: no
    other process is writing one.
    """
    patterns = (".*", "*/.*") if within else (f".{glob.escape(path.name)}.*",)
    place = path if within else path.parent
    found = [one for pattern in patterns for one in place.glob(pattern)]
    for left in sorted(one for one in found if TEMPORARY.search(one.name)):
        whole = left.with_name(left.name[1:-13])
        if left.suffix == ASIDE and not os.path.lexists(whole):
            os.rename(left, whole)
        elif left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def discard(directory: Path) -> None:
    """Remove a directory: at once under its name, its files thereafter."""
    hidden = temporary_sibling(directory)
    os.rename(directory, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def share(path: Path) -> None:
    """Give the files of safetensors, which only their owner may read, the usual permissions.

    safetensors from 0.8 on makes files so, whatever the umask: nobody else could open a model that
    lies in a shared folder. Links, and files that have another name as well, stay as they are.
    """
    for file in path.glob("*.safetensors") if path.is_dir() else [path]:
        status = file.lstat() if os.path.lexists(file) else None
        if status and status.st_nlink == 1 and status.st_mode == stat.S_IFREG | PRIVATE:
            # The umask can only be read by setting it, which other threads would notice.
            probe = temporary_sibling(file)
            probe.touch()
            try:
                file.chmod(stat.S_IMODE(probe.stat().st_mode))
            finally:
                probe.unlink()


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it onto ``path`` if the block succeeds.

    On any exception, Ctrl-C among them, the temporary file is removed and ``path`` is as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    try:
        yield temporary
        share(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``; move it to ``path`` on success.

    An existing directory at ``path`` stays until the new one is complete. On any exception the
    temporary directory is removed and ``path`` is as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        if target.exists():
            replaced = temporary_sibling(target).with_suffix(ASIDE)
            os.rename(target, replaced)
            os.rename(temporary, target)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, target)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


@contextmanager
def room_to_write(
    what: str, directory: Path, way_out: str | Callable[[], str], needed: float = 0
) -> Iterator[None]:
    """Turn a disk that is full, or fails, into an error that says how much is free and what to do.

    Args:
        what: the block writes, and where.
        directory: on the same disk; it need not be there yet.
        way_out: what is left and what to do, as sentences.
        needed: bytes that it takes.

    Raises:
        PrismError: fewer than ``needed`` bytes are free, or a write in the block failed.
    """
    import pyarrow as pa
    from safetensors import SafetensorError

    if _free(directory) < needed:
        raise _not_written(what, directory, way_out, needed, "the disk is full")
    try:
        yield
    except (OSError, SafetensorError, pa.ArrowException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not FAILED_WRITE.search(str(error)):
            raise
        raise _not_written(what, directory, way_out, needed, error) from error


def check_room(what: str, directory: Path, expected: float, there: Path | None = None) -> None:
    """Check before long work that half of what will come of it, at least, can be written.

    Args:
        what: will be written, and where.
        directory: on the same disk; it need not be there yet.
        expected: bytes that it takes, about.
        there: a directory that may hold some of it already.

    Raises:
        PrismError: not half of the bytes that are expected are free.
    """
    files = there.rglob("*") if there is not None else ()
    expected -= sum(path.stat().st_size for path in files if path.is_file())
    if _free(directory) < expected / 2:
        raise _not_written(what, directory, WAY_OUT, expected, "the disk is full")


def _free(directory: Path) -> int:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _not_written(
    what: str, directory: Path, way_out: str | Callable[[], str], needed: float, cause: object
) -> PrismError:
    takes = f"it takes about {needed / 1e6:,.1f} MB, and " if needed else ""
    rest = way_out if isinstance(way_out, str) else way_out()
    free = f"{_free(directory) / 1e6:,.1f} MB are free"
    return PrismError(f"{what} could not be written ({cause}): {takes}{free}. {rest}")


def json_text(value: Any, **how: Any) -> str:
    """Return JSON, the only way that prismlm writes it: NaN and infinity, which it lacks, are null.

    Args:
        value: JSON values.
        how: as ``json.dumps`` takes it, such as ``indent``.
    """
    how = {"ensure_ascii": False, "allow_nan": False} | how
    try:
        return json.dumps(value, **how)  # noqa: TID251
    # Rare: a number that is not finite, or a mapping that is no dict.
    except (ValueError, TypeError):
        return json.dumps(finite(value), **how)  # noqa: TID251


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int = 2) -> None:
    """Write ``value`` as indented UTF-8 JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json_text(value, indent=indent) + "\n", encoding="utf-8")


def keep_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON as :func:`write_json`, where no block around it says that the disk is full.

    Raises:
        PrismError: the disk is full or failing.
    """
    with room_to_write(str(path), Path(path).parent, WAY_OUT):
        write_json(path, value)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        FormatError: the file is not valid JSON, nested too deep, or of numbers without end.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    # A number of too many digits is a ValueError, as are bytes that are no UTF-8.
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}). Build it again.") from error


def read_text(file: Path | str, stream: IO[bytes] | None = None) -> str:
    """Return a text file, or what a stream of that name gives, as one text.

    Raises:
        InputError: it cannot be read, is larger than 128 MiB, or :func:`decoded` refuses it.
    """
    try:
        with open(file, "rb") if stream is None else nullcontext(stream) as opened:
            data = opened.read(LARGEST_TEXT + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{file} cannot be read ({why}): expected a text file.") from error
    if len(data) > LARGEST_TEXT:
        raise too_large(str(file))
    return decoded(data, str(file))


def too_large(where: str) -> InputError:
    """Return the error of a text, or a line of texts, that is larger than is held at once."""
    return InputError(
        f"{where} is larger than {LARGEST_TEXT >> 20:,} MiB, more than is read as one text: split "
        "it, for example into JSON lines with a document on each."
    )


def decoded(data: bytes, where: str) -> str:
    """Return UTF-8 as text, without its mark of byte order.

    Raises:
        BadRow: another encoding, or not text at all; the message says which, and what to do.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(data, where, error) from error
    if "\0" in text:
        raise not_utf8(data, where)
    return text


def not_utf8(data: bytes, where: str, error: UnicodeDecodeError | None = None) -> BadRow:
    """Return the error of bytes that are not UTF-8, or that hold NUL, which no text does."""
    begin, name = data[:4096], None
    even, odd = (begin[place::2].count(0) for place in (0, 1))
    if begin.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        name = "utf-32"
    elif begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        name = "utf-16"
    elif max(even, odd) > 0.2 * len(begin):  # of Latin text in UTF-16 every other byte is 0
        name = "utf-16be" if even > odd else "utf-16le"
    if name is not None:
        advice = f"Convert it first: iconv -f {name} -t utf-8 IN > OUT."
        return BadRow(f"{where} is {name[:6].upper()}. {advice}", "not UTF-8")
    controls = sum(byte < 32 and byte not in b"\t\n\v\f\r\x1b" for byte in begin)
    if error is None or 0 in begin or controls > 0.05 * len(begin):
        return BadRow(f"{where} is a binary file: expected text in UTF-8.", "binary")
    return BadRow(
        f"{where} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}. "
        "Convert it with iconv -f NAME -t utf-8 IN > OUT; NAME is its encoding, such as cp1252.",
        "not UTF-8",
    )


def from_json(kind: type[T], value: Any, where: str) -> T:
    """Return a dataclass with the fields of a JSON object, each of the type that it has there.

    Args:
        kind: the dataclass.
        value: what JSON holds.
        where: the file and what it describes, to name in the error.

    Raises:
        FormatError: a field that is missing or unknown, or a value of another type.
    """
    types = get_type_hints(kind)
    given = types.keys() & value.keys() if isinstance(value, dict) else types.keys()
    check_json(value, {name: types[name] for name in given}, where)
    try:
        return kind(**value)
    except TypeError as error:
        raise FormatError(f"{where} cannot be read: {error}. Build it again.") from error


def check_json(value: Any, kind: Any, where: str) -> None:
    """Check that a JSON value is of a type, or an object or list as one of types describes it.

    Raises:
        FormatError: it is not; it says where.
    """
    if isinstance(kind, dict):
        check_json(value, dict[str, Any], where)
        for name, item in kind.items():
            check_json(value.get(name), item, f"{where}: {name}")
    elif isinstance(kind, list):
        check_json(value, list[Any], where)
        for item in value:
            check_json(item, kind[0], where)
    elif not _is(value, kind):
        raise FormatError(
            f"{where} is {shown(value)}, which is of the wrong type. Put back the file that was "
            "written, or build it again."
        )


def _is(value: Any, kind: Any) -> bool:
    """Say whether a JSON value is of an annotated type."""
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is(value, one) for one in of)
    if origin is Literal:
        return value in of
    if origin is list:
        return isinstance(value, list) and all(_is(item, of[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(item, of[1]) for item in value.values())
    if kind in (int, float):
        number = isinstance(value, int if kind is int else (int, float))
        return number and not isinstance(value, bool) and abs(value) < LARGEST
    if kind is str:
        return isinstance(value, str) and not SURROGATE.search(value)
    return kind is Any or isinstance(value, kind)


def finite(value: Any) -> Any:
    """Return JSON values in which NaN and infinity are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
