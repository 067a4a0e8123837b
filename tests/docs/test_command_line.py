"""The command line's reference is what the commands themselves say."""

import subprocess
import sys
from pathlib import Path

import typer
from typer.testing import CliRunner

from prismlm.cli import app

ROOT = Path(__file__).parents[2]


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
