"""The study of channels on small models, and its page."""

import json

import pytest
import torch

from benchmarks.prototype_mixer import channel_concepts, channels, render_channels
from tests.helpers.mixer_models import make_corpus, make_model


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The JSON that the script writes for two small models."""
    directory = tmp_path_factory.mktemp("channels")
    corpus = make_corpus(directory)
    for seed in (0, 1):
        model = make_model(len(corpus.tokenizer))
        torch.manual_seed(seed)
        for block in model.model.layers:
            block.mixer.prototypes.copy_(torch.randn_like(block.mixer.prototypes))
        model.save_pretrained(directory / f"seed{seed}")
        corpus.tokenizer.save_pretrained(directory / f"seed{seed}")
    command = ["channels.py", *(str(directory / f"seed{seed}") for seed in (0, 1))]
    command += ["--corpus", str(corpus.path), "--concepts", "2", "--words", "1", "--controls", "2"]
    command += [
        "--least",
        "5",
        "--common",
        "0",
        "--minimum-cases",
        "2",
        "--minimum-probability",
        "1e-6",
    ]
    command += ["--lag-tokens", "500", "--out", str(directory / "channels.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", command)
        channels.main()
    return directory


def test_what_is_written(written):
    value = json.loads((written / "channels.json").read_text(encoding="utf-8"))
    assert len(value["channels"]) == 10
    places = {(row["layer"], row["channel"]) for row in value["channels"]}
    assert len(places) == 10
    for row in value["channels"]:
        assert len(row["sequences"]) == 3
        assert row["tokens"][0]["ratio"] >= row["tokens"][-1]["ratio"]
        assert all(sequence["token"] for sequence in row["sequences"] if sequence["after"])
    assert [model["model"] for model in value["models"]] == ["seed0", "seed1"]
    for model in value["models"]:
        assert sum(row["bundled"] for row in model["rows"]) == 5
        for row in model["rows"]:
            # This corpus knows nothing of the bundled concepts, and says so.
            assert (row["said"] is None) == (row["effect"] is not None)
    for concept in value["concepts"]:
        assert len(concept["controls"]) == 2
        assert all(layer == concept["layer"] for layer, _ in concept["controls"])
        assert [effect["intervention"] for effect in concept["effects"]] == list(
            channel_concepts.INTERVENTIONS
        )
    assert len(value["lags"]) == 3
    assert value["lags"][0]["peaks"]["0"] == 6


def test_the_page_is_what_the_json_gives(written, monkeypatch):
    monkeypatch.setattr("sys.argv", ["render", "--results", str(written)])
    assert render_channels.main() == 0
    page = (written / "channels.md").read_text(encoding="utf-8")
    for heading in (
        "Concepts found by what writes",
        "The same words in every model",
        "Ten channels, unselected",
        "Half-life and repetition",
        "Sparsity by layer",
        "Reading before writing",
    ):
        assert f"## {heading}" in page
    monkeypatch.setattr("sys.argv", ["render", "--check", "--results", str(written)])
    assert render_channels.main() == 0
    (written / "channels.md").write_text(page + "x", encoding="utf-8")
    assert render_channels.main() == 1


def concept(rank, p, median):
    effect = {
        "intervention": channels.TESTED,
        "cases": 12,
        "median_relative": median,
        "interval": [median - 1, median + 1],
        "median_size": abs(median),
        "control_sizes": [0.5, 1.0, 1.5, 2.0, 2.5],
        "rank": rank,
        "p_size": p,
        "beats_controls": rank == 1 and p < 0.05,
    }
    return {
        "layer": 1,
        "channel": rank,
        "words": [{"text": " river"}, {"text": " a|b"}],
        "difference": 3.25,
        "half_life": 13.5,
        "controls": [],
        "baseline": 0.125,
        "effects": [effect],
    }


def test_the_verdict_by_hand():
    settings = {"tested": channels.TESTED, "controls": 5, "minimum_cases": 10}
    settings |= {"minimum_probability": 0.01}
    good = [concept(1, 0.001, -8.0), concept(1, 0.01, -3.0), concept(2, 0.2, 4.0)]
    # Ranks from the top: 0, 0 and 1 of 5: 1 way for all at the top, 3 with one second, of 216.
    assert channels.overall(good, 5) == pytest.approx(4 / 216)
    value = {"settings": settings, "concepts": good, "passed_over": 7}
    value["overall"] = channels.overall(good, 5)
    page = "\n".join(render_channels._concepts(value))
    assert "2 of 3 beat their controls; in 2 the median change is a fall" in page
    assert "do move their" not in page
    assert "**Channels found by write activation move their words more" in page
    assert "| L1 P1 | river, a\\|b | 13.5 | 3.25 | 12 | 12.5 | -8.00 | -9.00 to -7.00 |" in page
    assert "7 were passed over" in page
    bad = [concept(4, 0.5, -8.0), concept(3, 0.4, -3.0)]
    page = "\n".join(
        render_channels._concepts(value | {"concepts": bad, "overall": channels.overall(bad, 5)})
    )
    assert "0 of 2 beat their controls" in page
    assert "**This does not work here" in page
    empty = "\n".join(render_channels._concepts(value | {"concepts": []}))
    assert "nothing was tested" in empty
    assert channels.overall([], 5) is None
