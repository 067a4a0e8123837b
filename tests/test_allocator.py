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


def test_a_user_s_own_setting_stands():
    kept, _ = churn("keep", "setting alone", MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
