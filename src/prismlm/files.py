"""Writing so that nothing is ever half-written: a temporary sibling, then one rename."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prismlm.errors import FormatError, InputError


def _temporary_sibling(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


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
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``; put it in the place of ``path`` on success.

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
            replaced = _temporary_sibling(target)
            os.rename(target, replaced)
            os.rename(temporary, target)
            shutil.rmtree(replaced)
        else:
            os.rename(temporary, target)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)


@contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes that ask for it from writing to ``path`` during the block.

    The kernel gives the lock back however this process ends.

    Raises:
        InputError: another process holds it.
    """
    target = Path(path)
    lock = target.with_name(f".{target.name}.lock")
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"{target} is being written by another process. Wait until it has ended, or "
                "choose another name."
            ) from None
        # Whoever held the lock before may have removed the file in between.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


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
