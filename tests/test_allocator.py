"""Freed memory is kept for the next step, or returned where weights are read again and again."""

import os
import platform
import subprocess
import sys

import pytest

from prismlm.allocator import SETTINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not set"),
]
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
READS = """
import torch
from prismlm.allocator import keep_freed_memory, return_freed_memory
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if "RssAnon" in line)
return_freed_memory()
kept = keep_freed_memory()
before, most, states = resident(), 0, torch.ones(1024, 1024)
for layer in range(48):  # activations of many sizes, and weights that stay until the next ones
    weights = [torch.ones(1024, 1024) for _ in range(9)]
    states = (states + 1).repeat(1 + layer % 3, 1)[:1024] @ weights[0]
    most = max(most, resident() - before)
print(int(kept), most)
"""


def run(*arguments, code=STEPS):
    """Return whether memory was kept, and the page faults of ten steps."""
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [sys.executable, "-c", code, *arguments]
    return map(int, subprocess.check_output(command, env=environment, text=True).split())


def test_steps_cause_few_page_faults():
    (default, without), (kept, faults) = run(), run("keep")
    assert (default, kept) == (0, 1)
    assert faults < 0.05 * without


def test_weights_that_are_read_again_take_their_own_memory():
    kept, most = run(code=READS)
    assert (kept, most < 80_000) == (0, True)
