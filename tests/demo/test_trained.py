"""The demo end to end at a tiny size; the quick demo interrupted in every phase is slow."""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import prismlm
from prismlm.cli.app import app
from prismlm.corpus import Corpus
from prismlm.demo.prompts import PROMPTS, REPORT_COST, estimate
from prismlm.demo.trained import QUICK, DemoSize, identity, run_demo
from prismlm.errors import InputError
from tests.helpers import forked

TINY = DemoSize(
    "demo-quick.yaml",
    vocab_size=1024,
    every=90,
    contexts=4,
    cost={},
    overrides=(
        "steps=15",
        "head.prototypes=64",
        "head.initialise_at_step=5",
        "evaluation.every=0",
        "evaluation.final_tokens=1000",
    ),
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return run_demo(tmp_path_factory.mktemp("demo") / "tiny", TINY)


def test_everything_is_there_and_one_prompt_per_domain_is_explained(demo):
    corpus = Corpus.open(demo.corpus)
    assert set(PROMPTS) == set(corpus.column("domain"))
    assert [answer.domain for answer in demo.answers] == list(PROMPTS)
    for answer in demo.answers:
        assert sum(share for _, share in answer.shares) + answer.unattributed <= 1 + 1e-6
        assert answer.words
        assert answer.prompt.endswith(PROMPTS[answer.domain])
        assert answer.passage
    assert demo.report.read_text(encoding="utf-8").startswith("<!")
    assert not demo.cached


def test_a_second_run_builds_nothing(demo):
    files = {path: path.stat().st_mtime_ns for path in demo.model.rglob("*") if path.is_file()}
    again = run_demo(demo.model.parent, TINY)
    assert again.cached
    assert files == {p: p.stat().st_mtime_ns for p in demo.model.rglob("*") if p.is_file()}
    assert again.answers == demo.answers


def test_an_estimate_counts_the_report_wherever_a_part_is_missing(demo, tmp_path):
    out = Path(shutil.copytree(demo.model.parent, tmp_path / "demo"))
    part = {"lens": (30.0, 10**9, 10**8)}
    assert estimate(out, identity(TINY), part, "").seconds == 0
    shutil.rmtree(out / "model" / "lens")
    assert estimate(out, identity(TINY), part, "").seconds == 30 + REPORT_COST[0]


def test_what_other_code_explained_is_explained_again(demo, tmp_path):
    out = Path(shutil.copytree(demo.model.parent, tmp_path / "demo"))
    summary = out / "summary.json"
    before = json.loads(summary.read_text())
    changed = {"of": [], "answers": [one | {"field": "of old"} for one in before["answers"]]}
    summary.write_text(json.dumps(changed))
    os.utime(out / "model" / "prototype_head.safetensors")
    assert run_demo(out, TINY).answers == demo.answers
    now = json.loads(summary.read_text())
    assert now["answers"] == before["answers"]
    # The head is of another time.
    assert now["of"] != before["of"]


def test_a_missing_part_alone_is_built_again(demo):
    weights = (demo.model / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(demo.model / "lens")
    again = run_demo(demo.model.parent, TINY)
    assert not again.cached
    assert (demo.model / "model.safetensors").stat().st_mtime_ns == weights
    assert prismlm.load(demo.model).lens is not None


def test_another_size_is_refused(demo):
    with pytest.raises(InputError, match="another size"):
        run_demo(demo.model.parent, QUICK)


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(InputError, match="no demo made it"):
        run_demo(tmp_path, TINY)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_the_dry_run_of_the_command(tmp_path, monkeypatch):
    shown = forked.run("demo", "--quick", "--dry-run", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["out"] == "prismlm-demo-quick"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert "--json needs --dry-run" in CliRunner().invoke(app, ["demo", "--json"]).stderr
