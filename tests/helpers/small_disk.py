"""A full disk: a small file system that only the process under test and its children see."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import traceback
from functools import lru_cache
from pathlib import Path

from tests.helpers.forked import ROOT

MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
CLONE_NEWNS, CLONE_NEWUSER = 1 << 17, 1 << 28
CODE = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers.small_disk import within
within({directory!r}, {size!r}, {kept!r})
"""


@lru_cache(maxsize=1)
def can_mount() -> bool:
    """Return whether a user may mount a file system here that nobody else sees."""
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        bool(shutil.which("unshare")) and not subprocess.run(probe, capture_output=True).returncode
    )


def on_small_disk(directory: Path, size: str, kept: Path) -> str:
    """Return code to put before a forked process's own: ``directory`` is a disk of this size.

    What the process leaves there is copied to ``kept``, where it can be seen.
    """
    return CODE.format(root=ROOT, directory=str(directory), size=size, kept=str(kept))


def within(directory: str, size: str, kept: str) -> None:
    """Go on in a child for which ``directory`` is the disk; wait, copy what it left, and exit."""
    # As `unshare -rm` does, which would start Python and import everything again.
    own = os.getuid(), os.getgid()
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    for kind, number in zip(("uid", "gid"), own, strict=True):
        Path(f"/proc/self/{kind}_map").write_text(f"0 {number} 1")
    call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"tmpfs", os.fsencode(directory), b"tmpfs", 0, f"size={size}".encode())
    if not (child := os.fork()):
        return
    code = 70
    try:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.copytree(directory, kept)
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
