"""GLUE on two small models, and the verdicts by hand."""

import json

import pytest

from benchmarks.prototype_mixer import glue, render_glue
from prismlm.files import write_json
from tests.benchmarks.scripts import run
from tests.helpers.glue_rows import save_glue_model, write_toy

WHERE = {"date": "2026-01-01", "python": "3", "torch": "2", "transformers": "5", "machine": "here"}


def test_what_the_script_writes_is_rendered(tmp_path, monkeypatch):
    data = write_toy(tmp_path / "data", rows=16)
    words = ["--data", data, "--tasks", "sst2", "--seeds", 0, 1, "--learning-rate", "1e-3"]
    words += ["--out", tmp_path / "prototype_mixer" / "glue", "--work", tmp_path / "work"]
    words += ["--threads", 1]
    for family in ("llama", "protot"):
        words += ["--model", f"{family}={save_glue_model(tmp_path / family, family)}"]
    run(glue, monkeypatch, *words)
    found = json.loads((tmp_path / "prototype_mixer" / "glue" / "protot.json").read_text())
    assert (found["model"], found["type"], found["data"]) == ("protot", "prismlm_protot", "data")
    assert found["tasks"][0]["from_scratch"]["seeds"] == [0, 1]
    assert str(tmp_path) not in json.dumps(found)


def test_small_tasks_in_full_beside_a_share_of_the_large_ones(tmp_path, monkeypatch):
    data = write_toy(tmp_path / "data", rows=32)
    words = ["--data", data, "--tasks", "sst2", "rte", "--seeds", 0, 1, "--scratch-seeds", 1]
    words += ["--large-limit", 16, "--search-limit", 16, "--search-rates", 1e-4, 3e-4]
    words += ["--threads", 1]
    out = tmp_path / "prototype_mixer" / "glue"
    words += ["--out", out, "--work", tmp_path / "work"]
    monkeypatch.setattr(glue, "search", searched)
    run(glue, monkeypatch, *words, "--model", f"llama={save_glue_model(tmp_path / 'llama')}")
    found = json.loads((out / "llama.json").read_text())
    assert {row["title"]: row["train"]["rows"] for row in found["tasks"]} == {
        "RTE": 32,
        "SST-2": 16,
    }
    assert (found["learning_rate"], found["warmup"], found["rate_from"]) == (3e-4, 0.06, "searched")
    for row in found["tasks"]:
        assert row["fine_tuned"]["seeds"] == [0, 1]
        assert row["from_scratch"]["seeds"] == [1]
    # Nothing is trained again.
    runs = sorted((tmp_path / "work").rglob("runs/*.json"))
    assert len(runs) == 6
    times = [path.stat().st_mtime_ns for path in runs]
    run(glue, monkeypatch, *words, "--model", f"llama={tmp_path / 'llama'}")
    assert [path.stat().st_mtime_ns for path in runs] == times


def searched(lm, out, options, rates):
    """Leave what a search does; MNLI, which one would be made on, is not there."""
    assert (options.limit, options.dev_limit) == (16, 16)
    note = {"learning_rate": rates[-1], "warmup": 0.06, "model": lm.identity}
    note["tried"] = [{"learning_rate": rate} for rate in rates]
    (out / "search").mkdir(parents=True, exist_ok=True)
    write_json(out / "search" / "search.json", note | {"format_version": 1})
    return note


def made_up(name, kind, figures, scratch=0.5):
    """A model of one seed's worth of figures by task, a point more for the second seed."""

    def arm(value):
        values = {"accuracy": [value, value + 0.01]}
        mean = {"accuracy": value + 0.005}
        return {"seeds": [0, 1], "values": values, "mean": mean} | {
            "low": value - 0.02,
            "high": value + 0.03,
        }

    rows = {"rows": 100, "of": 100, "there": 100, "where": "x"}
    tasks = [
        {"title": title, "split": "dev", "metrics": ["accuracy"], "constant": {"accuracy": 0.5}}
        | {"train": rows, "measured": rows, "fine_tuned": arm(value), "from_scratch": arm(scratch)}
        for title, value in figures.items()
    ]
    settings = {"learning_rate": 1e-4, "warmup": 0.1, "rate_from": "searched", "epochs": 3}
    settings |= {"batch_size": 16, "parameters": 5, "environment": WHERE, "tried": []}
    return {"model": name, "type": kind, "tasks": tasks} | settings


@pytest.mark.parametrize(
    ("protot", "llama", "words"),
    [
        (0.70, 0.80, ["above ProtoT: shown, by +10.0", "on par with Mamba: shown, +0.0"]),
        (
            0.80,
            0.75,
            ["above ProtoT: the opposite, by -5.0", "with Mamba: the opposite, it is abo"],
        ),
        (0.70, 0.705, ["above ProtoT: not shown, by +0.5"]),
        (0.60, 0.80, ["with Mamba: the opposite, it is below, -10.0"]),
    ],
)
def test_verdicts_by_hand(protot, llama, words):
    models = [
        made_up("p", "prismlm_protot", {"SST-2": protot, "MNLI": protot}),
        made_up("l", "llama", {"SST-2": llama, "MNLI": llama, "RTE": 0.1}),
        made_up("m", "mamba2", {"SST-2": 0.7, "MNLI": 0.7}),
    ]
    page = render_glue.render(models)
    for said in words:
        assert said in page
    place = 1 + sum(other > protot for other in (llama, 0.7))
    verdict = "shown" if place == 2 else "not shown"
    assert f"ProtoT is second on MNLI: {verdict}, it is number {place} of 3\n" in page
    # Intervals are 0.05 wide.
    near = {"LLaMA": abs(protot - llama) < 0.051, "Mamba": abs(protot - 0.7) < 0.051}
    for kind, overlaps in near.items():
        assert overlaps == any(
            line.startswith("- Its interval on MNLI overlaps") and kind in line
            for line in page.splitlines()
        )
    assert (
        "`l`, its training helps (control): the interval lies above that from scratch in 2" in page
    )
