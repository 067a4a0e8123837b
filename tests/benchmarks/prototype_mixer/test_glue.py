"""GLUE on two small models, its page, and the verdicts by hand."""

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
    assert run(render_glue, monkeypatch, "--results", tmp_path) == 0
    page = (tmp_path / "prototype_mixer_glue.md").read_text()
    assert "| SST-2 | accuracy | 16 of 67,349 | 4 of 872 | 50.0 |" in page
    assert "| CoLA | not measured: no such dev set was there |" in page
    command = "    python -m benchmarks.prototype_mixer.glue --model llama=DIR --data DIR"
    assert f"\n{command} --learning-rate 0.001 --seeds 0 1 --scratch-seeds 0 1\n" in page
    assert "mean over seeds 0, 1, in brackets" in page
    assert "without its training (seeds 0, 1)." in page
    assert "Means over SST-2;" in page
    assert "LLaMA is above ProtoT: " in page
    assert run(render_glue, monkeypatch, "--check", "--results", tmp_path) == 0


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
    assert run(render_glue, monkeypatch, "--results", tmp_path) == 0
    page = (tmp_path / "prototype_mixer_glue.md").read_text()
    assert "(searched, best of 2, on 16 rows of SST-2 and of MNLI)" in page
    assert (
        " --data DIR --large-limit 16 --search-limit 16 --search-rates 0.0001 0.0003 "
        "--seeds 0 1 --scratch-seeds 1\n"
    ) in page
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
    assert "In no set does a model gain" not in page
    assert "Means over SST-2, MNLI;" in page
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


def test_models_that_gain_nothing_are_said_to_be_no_comparison():
    models = [
        made_up("p", "prismlm_protot", {"SST-2": 0.5}, scratch=0.5),
        made_up("l", "llama", {"SST-2": 0.5}, scratch=0.5),
    ]
    page = render_glue.render(models)
    assert "**In no set does a model gain by its training**" in page
    assert "in 0 of 1 sets" in page
    assert "\n\nNot measured yet: Mamba, DeltaNet.\n\n| task" in page
    titles = ("CoLA", "SST-2", "MRPC", "RTE", "QNLI")
    models = [
        made_up(name, kind, dict.fromkeys(titles, 0.5), scratch=0.5)
        for name, kind in (("p", "prismlm_protot"), ("l", "llama"))
    ]
    models.append(made_up("m", "mamba2", {"SST-2": 0.9}, scratch=0.1))
    assert "In 1 of 11 sets does a model gain" in render_glue.render(models)


def test_the_mean_is_over_the_sets_that_all_models_have():
    models = [
        made_up("p", "prismlm_protot", {"SST-2": 0.6, "MNLI": 0.8}, scratch=0.4),
        made_up("l", "llama", {"SST-2": 0.7, "MNLI": 0.5, "RTE": 0.1}),
    ]
    # Seeds 0 and 1 of p: 60 and 61, 80 and 81, so means of 70 and 71; from scratch 40 and 41.
    means = "70.5 (seeds 70.0 to 71.0) / 40.5 | 60.5 (seeds 60.0 to 61.0) / 50.5"
    assert f"| mean of 2 | | | | 50.0 | {means} |\n" in render_glue.render(models)
    del models[0]["tasks"][1]
    assert "mean of" not in render_glue.render(models)
    models = [made_up("l", "llama", {"SST-2": 0.7, "RTE": 0.1})]
    models[0]["tasks"][1]["from_scratch"] = None
    assert "40.5 (seeds 40.0 to 41.0) / – |\n" in render_glue.render(models)
