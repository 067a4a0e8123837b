"""The command line's reference is what the commands themselves say."""

import subprocess
import sys
from pathlib import Path

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
    code = (
        "import sys\n"
        "from prismlm.cli import app\n"
        "heavy = {'torch', 'transformers', 'pyarrow', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
