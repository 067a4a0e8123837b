"""The table of capabilities names tests that exist, and every command."""

import re
from pathlib import Path

from typer.main import get_command

from prismlm.cli.app import app

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
][2:]


def test_the_tests_exist():
    for row in ROWS:
        named = re.findall(r"`(\S+?)`", row[2])
        assert named, row
        for path in named:
            assert (ROOT / "tests" / path).exists(), path


def test_every_command_is_there():
    named = {command for row in ROWS for command in re.findall(r"`([\w-]+)`", row[1])}
    assert named == set(get_command(app).commands)
