"""prismlm inspect interventions on two small models of one corpus."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from tests.helpers.mixer_models import make_corpus, make_model


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A corpus, two models and a file of cases."""
    directory = tmp_path_factory.mktemp("interventions")
    corpus = make_corpus(directory)
    for seed in (0, 1):
        model = make_model(len(corpus.tokenizer))
        torch.manual_seed(seed)
        for block in model.model.layers:
            block.mixer.prototypes.copy_(torch.randn_like(block.mixer.prototypes))
        model.save_pretrained(directory / f"seed{seed}")
        corpus.tokenizer.save_pretrained(directory / f"seed{seed}")
    rows = [
        {"concept": "boxes", "context": f"{subject} collects letters in a", "target": "box"}
        for subject in ("Old maps", "A teacher", "The river", "My neighbour")
    ]
    cases = directory / "cases.jsonl"
    cases.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory, corpus, cases


def test_channels_are_found_in_each_model(prism, paths, tmp_path):
    directory, corpus, cases = paths
    out = tmp_path / "out"
    models = [directory / "seed0", directory / "seed1"]
    options = ["--minimum", "1e-6", "--controls", "2", "--out", out, "--json"]
    command = ["inspect", "interventions", *models, "--cases", cases]
    result = prism(*command, "--find", "--corpus", corpus.path, *options)
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    assert [item["model"] for item in value["models"]] == [str(path) for path in models]
    assert json.loads((out / "interventions.json").read_text()) == value
    for number, item in enumerate(value["models"]):
        best = item["found"]["rows"][0]
        place = (best["layer"], best["channel"])
        largest = max(d for layer in item["found"]["difference"] for d in layer)
        assert best["difference"] == largest
        assert item["emerges"] == (item["found"]["p"] < 0.05)
        table = item["table"]
        assert table["channels"] == [list(place)]
        assert table["cases"] == 4
        rows = pq.read_table(out / f"{number}-seed{number}.parquet").to_pylist()
        assert len(rows) == 4 * 3 * 5
        assert (
            f"**L{place[0]} P{place[1]}: change in %**"
            in (out / f"{number}-seed{number}.md").read_text()
        )
    assert value["models"][0]["heldout_count"] > 0


def test_a_channel_that_is_named(prism, paths):
    directory, _, cases = paths
    command = ["inspect", "interventions", directory / "seed0", "--cases", cases]
    result = prism(*command, "--channel", "1:2", "--channel", "2:0", "--minimum", "1e-6")
    assert result.returncode == 0, result.stderr
    shown = result.stdout
    for text in ("L1 P2: change in %", "L2 P0: change in %", "collects letters in a", "left out 0"):
        assert text in shown
    assert max(map(len, result.stdout.splitlines())) <= 100
    points = prism(
        *command, "--channel", "1:2", "--minimum", "1e-6", "--by", "points", "--controls", "1"
    )
    assert "percentage points" in points.stdout
    assert "Relative change of the probability, %" in points.stdout
    assert "controls 1 ·" in points.stdout


def test_what_cannot_be_asked_is_refused(refused, paths):
    directory, _, cases = paths
    command = ["inspect", "interventions", directory / "seed0", "--cases"]
    assert "expected either channels" in refused(*command, cases)
    assert "expected either channels" in refused(*command, cases, "--find", "--channel", "0:0")
    assert "--corpus DIR" in refused(*command, cases, "--find")
    assert "Did you mean 'women'" in refused(*command, "woman", "--channel", "0:0")
    assert "no channel 9 in layer 1" in refused(*command, cases, "--channel", "1:9")
    assert "expected LAYER:CHANNEL" in refused(*command, cases, "--channel", "1")
    assert "'points'" in refused(*command, cases, "--channel", "0:0", "--by", "point")
    assert "none of 4 cases" in refused(*command, cases, "--channel", "0:0", "--minimum", "0.99")
    assert "--first-token" in refused(*command, "mental_health", "--channel", "0:0")
    missing = directory / "nothing"
    assert "is not a directory" in refused(
        "inspect", "interventions", missing, "--cases", cases, "--channel", "0:0"
    )
