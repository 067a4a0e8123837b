"""Freed memory is kept for the next step."""

import os
import platform
import subprocess
import sys

import pytest

from prismlm.allocator import SETTINGS

STEPS = """
import resource, sys
from prismlm.allocator import keep_freed_memory
kept = "keep" in sys.argv and keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
if "measure" in sys.argv:
    import torch
    for step in range(16):
        before = faults() if step == 6 else before
        tensors = [torch.ones(20_000_000) for _ in range(3)]
        del tensors
print(int(kept), faults() - before)
"""


def run(*arguments, **environment):
    """Return whether memory was kept, and the page faults of ten steps."""
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [sys.executable, "-c", STEPS, *arguments]
    output = subprocess.check_output(command, env=inherited | environment, text=True)
    return [int(word) for word in output.split()]


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not set")
def test_steps_cause_few_page_faults():
    (default, without), (kept, faults) = run("measure"), run("keep", "measure")
    assert (default, kept) == (0, 1)
    assert faults < 0.05 * without


def test_settings_in_the_environment_take_precedence():
    assert run("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == 0
