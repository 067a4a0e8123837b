"""Atomic writes of files and directories, by one rename; JSON; and reading of text files."""

from __future__ import annotations

import glob
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import UnionType
from typing import IO, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from prismlm.errors import BadRow, FormatError, InputError, PrismError, shown

# Names in torch.save's RuntimeError of a failed write.
FAILED_WRITE = re.compile("PytorchStreamWriter|inline_container")
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.tmp$")
WAY_OUT = "Make room, and give the same command again."
# Of a store, such as s3://bucket/lens.
ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.+)")
# Bytes of one text, or of its line.
LARGEST_TEXT = 2**27
T = TypeVar("T")


def temporary_sibling(path: Path) -> Path:
    """Return an unused hidden name beside ``path``."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def remove_left_behind(path: Path, *, within: bool = False) -> None:
    """Remove temporary siblings of ``path`` left by a killed process; the caller holds its lock.

    ``within`` looks inside the directory instead, two levels deep: anything deeper, such as in a
    lens, may be in use.
    """
    patterns = (".*", "*/.*") if within else (f".{glob.escape(path.name)}.*",)
    parent = path if within else path.parent
    for leftover in [sibling for pattern in patterns for sibling in parent.glob(pattern)]:
        if TEMPORARY.search(leftover.name) and leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        elif TEMPORARY.search(leftover.name):
            leftover.unlink(missing_ok=True)


def address_of(path: object) -> str | None:
    """Return an address in a store, such as s3://bucket/lens, or None for a name or path."""
    # A path has lost one of the two slashes.
    match = ADDRESS.fullmatch(str(path))
    if match is None or os.path.exists(str(path)):
        return None
    return f"{match[1]}://{match[2].rstrip('/')}"


def discard(directory: Path) -> None:
    """Remove a directory; its name is free at once."""
    hidden = temporary_sibling(directory)
    os.rename(directory, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a file appear in another place too, by a hard link, or a copy if there are none."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy(source, target)


def share(path: Path) -> None:
    """Give safetensors files that were just written the usual permissions.

    From version 0.8, safetensors ignores the umask, so nobody else could open a model in a shared
    directory.
    """
    files = [*path.glob("*.safetensors")] if path.is_dir() else [path]
    # Reading the umask means setting it, which would affect other threads.
    probe = temporary_sibling(files[0]) if files else path
    for file in files:
        probe.touch()
        file.chmod(stat.S_IMODE(probe.stat().st_mode))
        probe.unlink()


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``, which is renamed onto it if the block succeeds.

    On any exception the temporary file is removed and ``path`` is unchanged.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    try:
        yield temporary
        if target.suffix == ".safetensors":
            share(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``, which replaces it if the block succeeds.

    On any exception the temporary directory is removed and ``path`` is unchanged.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        # A name that nothing removes, if this process is killed before the next line.
        replaced = temporary_sibling(target).with_suffix(".old")
        if exists := target.exists():
            os.rename(target, replaced)
        os.rename(temporary, target)
        if exists:
            shutil.rmtree(replaced)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


@contextmanager
def room_to_write(
    what: str, directory: Path, way_out: str | Callable[[], str], needed: float = 0
) -> Iterator[None]:
    """Raise PrismError if a write in the block fails, or fewer than ``needed`` bytes are free.

    Args:
        what: is written, and where.
        directory: on the same disk; it need not exist yet.
        way_out: what remains and what to do, as sentences.
        needed: bytes.
    """
    import pyarrow as pa
    from safetensors import SafetensorError

    try:
        if _free(directory) < needed:
            raise OSError("the disk is full")
        yield
    except (OSError, SafetensorError, pa.ArrowException, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not FAILED_WRITE.search(str(error)):
            raise
        takes = f"it takes about {needed / 1e6:,.1f} MB, and " if needed else ""
        hint = way_out if isinstance(way_out, str) else way_out()
        free = f"{_free(directory) / 1e6:,.1f} MB are free"
        raise PrismError(f"{what} could not be written ({error}): {takes}{free}. {hint}") from error


def check_room(what: str, directory: Path, expected: float, partial: Path | None = None) -> None:
    """Raise PrismError, before long work, unless half of the expected bytes are free.

    Args:
        what: will be written, and where.
        directory: on the same disk; it need not exist yet.
        expected: bytes.
        partial: a directory that may already have some of them.
    """
    for path, _, names in os.walk(partial) if partial else ():
        for name in names:
            with suppress(FileNotFoundError):  # another process may rename or remove it meanwhile
                expected -= os.stat(os.path.join(path, name)).st_size
    if _free(directory) < expected / 2:
        with room_to_write(what, directory, WAY_OUT, expected):
            pass


def existing_directory(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def _free(directory: Path) -> int:
    return shutil.disk_usage(existing_directory(directory)).free


def json_text(value: Any, **options: Any) -> str:
    """Return JSON, with null for NaN and infinity; ``options`` are those of ``json.dumps``."""
    options = {"ensure_ascii": False, "allow_nan": False} | options
    try:
        return json.dumps(value, **options)  # noqa: TID251
    except (ValueError, TypeError):  # rare: NaN, infinity, or a mapping other than dict
        return json.dumps(finite(value), **options)  # noqa: TID251


def write_json(path: str | os.PathLike[str], value: Any, *, indent: int = 2) -> None:
    """Write ``value`` as indented UTF-8 JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json_text(value, indent=indent) + "\n", encoding="utf-8")


def keep_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON as :func:`write_json`, or raise PrismError if the disk is full."""
    with room_to_write(str(path), Path(path).parent, WAY_OUT):
        write_json(path, value)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file, or raise FormatError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    # ValueError also covers invalid UTF-8 and integers with too many digits.
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}). Build it again.") from error


def read_text(file: Path | str, stream: IO[bytes] | None = None) -> str:
    """Return a text file, or an open stream with that name, of at most 128 MiB."""
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
    """Return the error for a text, or a line of a file, above the limit."""
    return InputError(
        f"{where} is larger than {LARGEST_TEXT >> 20:,} MiB, more than is read as one text: split "
        "it, for example into JSON lines with a document on each."
    )


def decoded(data: bytes, where: str) -> str:
    """Decode UTF-8 without its byte order mark; BadRow for another encoding or binary data."""
    why = "it holds NUL bytes, so it is binary, or UTF-16"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text, why = "\0", str(error)
    if "\0" in text:
        raise BadRow(
            f"{where} is not UTF-8 ({why}). Convert it with iconv -f NAME -t utf-8 IN > OUT; NAME "
            "is its encoding, such as cp1252 or UTF-16.",
            "not UTF-8",
        )
    return text


def from_json(kind: type[T], value: Any, where: str) -> T:
    """Return a dataclass from a JSON object, or raise FormatError; ``where`` names it in errors."""
    types = get_type_hints(kind)
    names = types.keys() & value.keys() if isinstance(value, dict) else types.keys()
    check_json(value, {name: types[name] for name in names}, where)
    try:
        return kind(**value)
    except TypeError as error:
        raise FormatError(f"{where} cannot be read: {error}. Build it again.") from error


def check_json(value: Any, types: Mapping[str, Any], where: str) -> None:
    """Raise FormatError unless a value is a JSON object with values of these types."""
    record: dict[str, Any] = value if isinstance(value, dict) else {}
    for name, kind in types.items():
        if not _is(record.get(name), kind):
            raise FormatError(
                f"{where}: {name} is {shown(record.get(name))}, which is of the wrong type. Put "
                "back the file that was written, or build it again."
            )


def _is(value: Any, kind: Any) -> bool:
    """Return whether a JSON value is of an annotated type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(_is(item, arguments[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is(v, arguments[1]) for v in value.values())
    if kind in (int, float):
        number = isinstance(value, int if kind is int else (int, float))
        return number and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


def finite(value: Any) -> Any:
    """Return JSON values with None for NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
