"""The pages on commands say what there is: the reference, and the table of capabilities."""

import re
import subprocess
import sys
from pathlib import Path

import typer
from typer.main import get_command
from typer.testing import CliRunner

from prismlm.cli import app

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
][2:]


def test_the_reference_is_current(tmp_path):
    fresh = tmp_path / "cli.md"
    command = [
        *(sys.executable, "-m", "typer", "prismlm.cli.app", "utils", "docs"),
        *("--name", "prismlm", "--title", "Command line", "--output", str(fresh)),
    ]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    expected = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert fresh.read_text(encoding="utf-8") == expected, f"write docs/cli.md with {command}"


def test_help_is_fast():
    """Half a second on an idle machine: no heavy library may be imported for --help."""
    code = "import sys; from prismlm.cli import app; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True
    )
    loaded = set(result.stdout.split())
    assert not loaded & {"torch", "transformers", "pyarrow", "numpy", "pydantic"}


def test_a_missing_extra_is_named():
    cli = typer.Typer(cls=app.ErrorsAsMessages)

    @cli.command()
    def needs(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    @cli.command()
    def other() -> None:
        pass

    named, bug = (CliRunner().invoke(cli, ["needs", name]) for name in ("pydantic", "some_bug"))
    assert (named.exit_code, bug.exit_code) == (2, 1)
    assert "pip install 'prismlm[train]'" in named.stderr


def test_the_tests_exist():
    for row in ROWS:
        named = re.findall(r"`(\S+?)`", row[2])
        assert named, row
        for path in named:
            assert (ROOT / "tests" / path).exists(), path


def test_every_command_is_there():
    named = {command for row in ROWS for command in re.findall(r"`([\w-]+)`", row[1])}
    assert named == set(get_command(app.app).commands)
