"""What explain adds for models of prototype mixers, on the terminal, as JSON and on the page."""

import json

import pytest

import prismlm
from tests.helpers.chain_models import TEXT, chain_model


@pytest.fixture(scope="module")
def model(tiny_corpus, tmp_path_factory):
    return chain_model(tiny_corpus, tmp_path_factory.mktemp("protot"))


@pytest.fixture(scope="module")
def trace(model):
    return prismlm.load(model).explain(TEXT, generate=2)


def test_json_has_the_chains_of_every_position(prism, model, trace):
    result = prism("explain", model, TEXT, "--generate", 2, "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads(json.dumps(trace.to_dict()))
    for position in printed["positions"]:
        assert list(position)[-1] == "chains"
        for chain, use in zip(position["chains"], position["prototypes"], strict=False):
            assert set(chain) == {
                "prototype", "activation", "embedding", "mlps", "mixers", "edit", "channels",
            }  # fmt: skip
            assert chain["prototype"] == use["id"]
            total = chain["embedding"] + sum(chain["mlps"]) + sum(chain["mixers"])
            assert total + chain["edit"] == pytest.approx(use["activation"], abs=1e-5)
            for channel in chain["channels"]:
                assert set(channel) == {
                    "layer", "channel", "half_life", "activation_part", "contribution", "share",
                    "tokens",
                }  # fmt: skip
                assert all(set(s) == {"position", "token", "part"} for s in channel["tokens"])
    assert printed["positions"][0]["chains"][0]["channels"] == []
    assert len(printed["positions"][3]["chains"][0]["channels"]) == 3
