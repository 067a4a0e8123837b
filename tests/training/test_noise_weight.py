"""λ of signal/noise attention while a model trains, in whole and in resumed runs."""

import pytest
import torch
from safetensors.torch import load_file

from prismlm.errors import InputError
from prismlm.training import build_recipe, train
from prismlm.training.noise_weight import noise_weight_at

SIGNAL_NOISE = {
    "model_type": "prismlm_signal_noise",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "head_size": 8,
}


@pytest.fixture
def signal_noise(settings):
    settings["model"] = dict(SIGNAL_NOISE)
    settings["head"]["enabled"] = False
    settings["steps"] = 21
    settings["logging"]["every"] = 1
    return settings


def noise_weights(result):
    return [row["noise_weight"] for row in result.history if "noise_weight" in row]


def saved(directory):
    return load_file(directory / "model.safetensors")["model.noise_weight"].item()


def test_the_cosine_by_hand():
    at = [noise_weight_at(step, 5, initial=0.01, final=0.09) for step in range(5)]
    half = 0.04 * (1 - 2**-0.5)
    assert at == pytest.approx([0.01, 0.01 + half, 0.05, 0.09 - half, 0.09])
    assert noise_weight_at(0, 1, initial=0.01, final=0.1) == 0.1
    assert noise_weight_at(3, 9, initial=0.3, final=0.3) == 0.3


def test_it_rises_from_the_first_step_to_the_last_and_is_saved(signal_noise):
    result = train(build_recipe(signal_noise))
    values = noise_weights(result)
    expected = [noise_weight_at(step, 21, initial=0.01, final=0.1) for step in range(21)]
    assert values == pytest.approx(expected, rel=1e-6)
    assert saved(result.directory) == pytest.approx(0.1)
    tenth = result.directory / "checkpoints" / "checkpoint-20"
    assert saved(tenth) == pytest.approx(expected[19])


def test_it_can_be_fixed_or_nothing(signal_noise):
    weights = []
    for value in (0.0, 0.25):
        signal_noise["out"] += "-"
        fixed = {"initial": value, "final": value}
        result = train(build_recipe(signal_noise | {"noise_weight": fixed, "steps": 6}))
        assert set(noise_weights(result)) == {value}
        weights.append(load_file(result.directory / "model.safetensors"))
    drawn = {name: not torch.equal(weights[0][name], weights[1][name]) for name in weights[0]}
    assert drawn["model.layers.0.mlp.up_proj.weight"]


def test_it_is_refused_where_it_means_nothing(settings, signal_noise):
    own = settings | {"noise_weight": {"final": 0.2}}
    own["model"] = {"preset": "llama-tiny"}
    with pytest.raises(InputError, match="'llama' has no noise heads"):
        train(build_recipe(own))
    signal_noise["model"] = SIGNAL_NOISE | {"noise_weight": 0.3}
    with pytest.raises(InputError, match="two equal values: initial and final"):
        train(build_recipe(signal_noise))
    for value in (-0.1, 1.5):
        with pytest.raises(InputError, match=r"noise_weight\.final"):
            build_recipe(settings | {"noise_weight": {"final": value}})
