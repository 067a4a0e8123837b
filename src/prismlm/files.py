"""Writing so that nothing is ever half-written: a temporary sibling, then one rename."""

from __future__ import annotations

import glob
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prismlm.errors import FormatError, PrismError

# What torch.save says, as a RuntimeError, of a write that failed.
FAILED_WRITE = re.compile("PytorchStreamWriter|inline_container")
TEMPORARY = re.compile(r"\.[0-9a-f]{8}\.(tmp|old)$")
ASIDE = ".old"
PRIVATE = stat.S_IRUSR | stat.S_IWUSR


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def remove_left_behind(path: Path) -> None:
    """Remove the temporary siblings that a killed process left of ``path``.

    A directory that was moved aside, where the kill came before the new one took its place, is
    moved back. To be called by whoever holds the lock on it: no other process is writing one.
    """
    for left in sorted(path.parent.glob(f".{glob.escape(path.name)}.*")):
        if not TEMPORARY.search(left.name):
            continue
        if left.suffix == ASIDE and not os.path.lexists(path):
            os.rename(left, path)
        elif left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


def share(path: Path) -> None:
    """Give a file, or those of a directory, that its owner alone may read the usual permissions.

    safetensors from 0.8 on makes files so, whatever the umask: nobody else could open a model that
    lies in a shared folder. Where the umask says the same, nothing changes.
    """
    for file in list(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file() and stat.S_IMODE(file.stat().st_mode) == PRIVATE:
            # The umask can only be read by setting it, which other threads would notice.
            probe = _temporary_sibling(file)
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
    temporary = _temporary_sibling(target)
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
    temporary = _temporary_sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        if target.exists():
            replaced = _temporary_sibling(target).with_suffix(ASIDE)
            os.rename(target, replaced)
            os.rename(temporary, target)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, target)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


@contextmanager
def room_to_write(what: str, directory: Path, way_out: str) -> Iterator[None]:
    """Turn a disk that is full, or fails, into an error that says how much is free and what to do.

    Raises:
        PrismError: a write in the block failed.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not FAILED_WRITE.search(str(error)):
            raise
        free = shutil.disk_usage(directory).free
        raise PrismError(
            f"{what} could not be written ({error}): {free / 1e6:,.1f} MB are free. {way_out}"
        ) from error


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented UTF-8 JSON, atomically."""
    with atomic_file(path) as temporary:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        FormatError: the file is not valid JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not valid JSON ({error}). Build it again.") from error


def finite(value: Any) -> Any:
    """Return JSON values in which NaN and infinity are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
