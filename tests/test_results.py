"""Published pages are what their JSON gives."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "attribution",
        "attribution_latency",
        "chain",
        "channels",
        "edits",
        "first_light",
        "index",
        "mixer",
        "prototype_head",
        "prototype_mixer",
        "protopnet",
    ],
)
def test_a_page_is_rendered_from_its_json(page):
    command = [sys.executable, f"benchmarks/render_{page}.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
