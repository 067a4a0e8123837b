"""README's example is what the demo's model says."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prismlm.cli.app import app
from prismlm.demo.fetch import Unreachable
from prismlm.demo.fetched import run_fetched

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_example_is_what_the_command_prints(tmp_path):
    text = README.read_text(encoding="utf-8")
    command, shown = re.findall(r"```\n\$ prismlm (explain [^\n]*)\n(.*?)```", text, re.DOTALL)[0]
    with contextlib.chdir(tmp_path):
        try:
            run_fetched(Path("prismlm-demo"))
        except Unreachable as error:
            pytest.skip(str(error))
        printed = CliRunner().invoke(app, shlex.split(command)).stdout.splitlines()
    wanted = [line.strip() for line in shown.splitlines() if line.strip()]
    assert len(wanted) > 8
    # Wherever lines break on this terminal.
    flat = " ".join(" ".join(printed).split())
    assert " ".join(" ".join(wanted).split()) in flat
