"""Freed memory is kept for the next step."""

import os
import platform
import subprocess
import sys

import pytest

from prismlm.allocator import SETTINGS

CHURN = """
import resource, sys
from prismlm.allocator import keep_freed_memory
kept = sys.argv[1] == "keep" and keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    tensors = [torch.ones(20_000_000) for _ in range(3)]
before = faults()
if sys.argv[2] == "measure":
    import torch
    for _ in range(6):
        step()
    before = faults()
    for _ in range(10):
        step()
print(kept, faults() - before)
"""


def churn(how, what="measure", **environment):
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [sys.executable, "-c", CHURN, how, what]
    result = subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    )
    kept, faults = result.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_steps_do_not_fault_their_memory_in_again():
    assert churn("leave")[0] is False
    without, (kept, faults) = churn("leave")[1], churn("keep")
    assert kept
    assert faults < 0.05 * without


RETURN = """
from pathlib import Path
import torch
from prismlm.allocator import keep_freed_memory, return_freed_memory, returning_freed_memory
def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) // 1024
def freed_at_once():
    tensors = [torch.ones(300_000) for _ in range(200)]
    last, held = tensors[-1], own()
    del tensors
    return held - own(), last
keep_freed_memory()
with returning_freed_memory():
    inside, _ = freed_at_once()
kept, last = freed_at_once()
before = own()
return_freed_memory()
print(inside, kept, before - own(), float(last.sum()))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_what_was_kept_is_returned_though_a_block_after_it_is_in_use():
    """240 MB of tensors are freed but for the last, within the block and after it."""
    inherited = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    result = subprocess.run(
        [sys.executable, "-c", RETURN], env=inherited, capture_output=True, text=True, check=True
    )
    inside, kept, returned, total = map(float, result.stdout.split())
    assert kept < 20
    assert min(inside, returned) > 150
    assert total == 300_000


def test_a_user_s_own_setting_stands():
    kept, _ = churn("keep", "setting alone", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
