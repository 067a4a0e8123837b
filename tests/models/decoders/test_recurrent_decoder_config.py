"""Settings of recurrent decoders, and those that are refused."""

import json
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, GenerationConfig

from prismlm.errors import InputError
from prismlm.models.decoders.protot import ProtoTConfig
from prismlm.models.presets import build_config, build_model
from tests.helpers.own_models import END, VOCABULARY, tokens

WRONG = {
    "temperature_mode": ("multipy", None),
    "decay_mode": ("tokens",),
    "alpha": (math.nan, math.inf, "1"),
    "dropout": (2.0, 1.0, -0.1, math.nan),
    "convolution_layers": ([5], [-1], ["0"], 1, [0, 1, 2]),
    "shared_gate_layers": ([5], [0.0], None),
    "initial_temperatures": ([1.0],),
    "num_channels": (0, 1.5),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_settings_that_would_build_another_model_are_refused(name):
    for value in WRONG[name]:
        settings = {"model_type": "prismlm_protot", "num_hidden_layers": 2, name: value}
        with pytest.raises(InputError, match=name):
            build_config(settings, 50, END)


@pytest.mark.usefixtures("unchecked")
def test_the_delta_rule_checks_its_settings_too():
    with pytest.raises(InputError, match="dropout"):
        build_config({"model_type": "prismlm_deltanet", "dropout": 2.0}, VOCABULARY, END)
    config = build_config({"model_type": "prismlm_deltanet", "num_heads": 7}, VOCABULARY, END)
    with pytest.raises(InputError, match="7 heads do not divide a width of 256"):
        build_model(config)


def test_a_model_of_one_layer_has_the_defaults_and_its_checkpoint_comes_back(tmp_path):
    settings = {"model_type": "prismlm_protot", "num_channels": 4, "hidden_size": 24}
    model = build_model(build_config(settings | {"num_hidden_layers": 1}, VOCABULARY, END)).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["convolution_layers"] == [0, 1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


def test_a_setting_by_its_former_name_is_not_passed_over():
    settings = {"num_channels": 4, "hidden_size": 24, "shared_routing_layers": [0]}
    with pytest.raises(StrictDataclassError, match="shared_routing_layers has 'gate' for"):
        ProtoTConfig(**settings)


@pytest.mark.parametrize("preset", ["protot", "deltanet", "signal-noise"])
def test_no_setting_is_taken_for_one_of_generation(preset):
    # transformers copies what has the name of one: a τ called temperature would sample with it.
    ours = set(build_config({"preset": preset}, 64, 0).to_dict())
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    everywhere = {"use_cache", "output_attentions", "output_hidden_states", "transformers_version"}
    assert ours & set(GenerationConfig().to_dict()) <= tokens | everywhere
