"""GLUE on a small model."""

import json

from benchmarks.prototype_mixer import glue
from prismlm.files import write_json
from tests.benchmarks.scripts import run
from tests.helpers.glue_rows import save_glue_model, write_toy


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
    assert (found["model"], found["type"], found["data"]) == ("llama", "llama", "data")
    assert str(tmp_path) not in json.dumps(found)
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
