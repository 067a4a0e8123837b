"""What figures were measured with: noted by every benchmark, and said on its page."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import prismlm

ROOT = Path(__file__).parents[2]


def processor() -> str:
    """Return what the processor calls itself, where that can be told.

    Sums are taken in another order on another processor: 750 training steps then end elsewhere.
    """
    processors = Path("/proc/cpuinfo")
    for line in processors.read_text().splitlines() if processors.is_file() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return what ran a benchmark, when and on what; the load is that of the last 15 minutes."""
    named = "CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    # Whoever copies files to another machine says what they are of: the history may not come along.
    commit = os.environ.get("GIT_COMMIT", commit)
    threads = torch.get_num_threads()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "machine": f"{platform.machine()}, {threads} threads, {named}",
        "processor": processor(),
        "threads": threads,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[2],
        "python": platform.python_version(),
        "prismlm": prismlm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
