"""The study of channels on small models."""

import json

import pytest
import torch

from benchmarks.prototype_mixer import channels
from prismlm.probes.channels.effects import INTERVENTIONS
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
        assert row["tokens"][0]["ratio"] >= row["tokens"][-1]["ratio"]
    assert [model["model"] for model in value["models"]] == ["seed0", "seed1"]
    for model in value["models"]:
        assert sum(row["bundled"] for row in model["rows"]) == 5
        for row in model["rows"]:
            # This corpus knows nothing of the bundled concepts, and says so.
            assert (row["said"] is None) == (row["effect"] is not None)
    for concept in value["concepts"]:
        assert len(concept["controls"]) == 2
        assert all(layer == concept["layer"] for layer, _ in concept["controls"])
        assert tuple(effect["intervention"] for effect in concept["effects"]) == INTERVENTIONS
    assert len(value["lags"]) == 3
    assert value["lags"][0]["peaks"]["0"] == 6


def test_the_chance_of_the_ranks_by_hand():
    good = [{"effects": [{"intervention": channels.TESTED, "rank": rank}]} for rank in (1, 1, 2)]
    # Ranks from the top: 0, 0 and 1 of 5: 1 way for all at the top, 3 with one second, of 216.
    assert channels.overall(good, 5) == pytest.approx(4 / 216)
    assert channels.overall([], 5) is None
