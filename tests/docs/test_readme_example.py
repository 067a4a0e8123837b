"""README's example is what the demo's model says."""

import contextlib
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.attribution.asked import questions
from prismlm.cli.app import app
from prismlm.demo.fetched import Unreachable, run_fetched
from prismlm.demo.texts import pairs_path, plain_texts

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_what_readme_says_of_the_demo_is_what_ships(tmp_path):
    text = README.read_text(encoding="utf-8")
    taught = pq.read_table(pairs_path())["split"].to_pylist().count("train")
    plain = pq.read_table(plain_texts(tmp_path / "plain.parquet")).num_rows
    assert f"{taught:,} questions and answers of MedQuAD and {plain} other texts" in text
    reported, chosen_on = (len(questions(half)) for half in ("report", "choose"))
    assert f"[{reported} questions](docs/results/asked.md)" in text
    assert f"[{reported + chosen_on} questions asked](docs/results/asked.md)" in text
    assert text.count("\n") < 150


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
