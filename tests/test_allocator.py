"""Freed memory is kept for the next step."""

import os
import platform
import subprocess
import sys

import pytest

from prismlm.allocator import SETTINGS

STEPS = """
import resource, sys, torch
from prismlm.allocator import keep_freed_memory
kept = "keep" in sys.argv and keep_freed_memory()
for step in range(16):
    if step == 6:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(20_000_000) for _ in range(3)]
    del tensors
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(*arguments):
    """Return whether memory was kept, and the page faults of ten steps."""
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [sys.executable, "-c", STEPS, *arguments]
    return map(int, subprocess.check_output(command, env=environment, text=True).split())


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not set")
def test_steps_cause_few_page_faults():
    (default, without), (kept, faults) = run(), run("keep")
    assert (default, kept) == (0, 1)
    assert faults < 0.05 * without
