"""Published pages are what their JSON gives."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_first_light_is_rendered_from_its_json():
    command = [sys.executable, "benchmarks/render_first_light.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_protopnet_is_rendered_from_its_json():
    command = [sys.executable, "benchmarks/render_protopnet.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
