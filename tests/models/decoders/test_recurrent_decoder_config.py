"""Settings of recurrent decoders, and those that are refused."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from prismlm.errors import InputError
from prismlm.models.presets import build_config, build_model
from tests.helpers.recurrent_models import END, FAMILIES, VOCABULARY, tokens

WRONG = {
    "temperature_mode": [("multipy", "expected 'divide' or 'multiply'. Did you mean 'multiply'"),
                         ("Divide", "Did you mean 'divide'"), (None, "None")],
    "decay_mode": [("tokens", "expected 'channel' or 'token'. Did you mean 'token'")],
    "alpha": [(math.nan, "expected a finite number"), (math.inf, "inf"), ("1", "'1'")],
    "dropout": [(2.0, "at least 0 and below 1"), (1.0, "1.0"), (-0.1, "-0.1"), (math.nan, "nan")],
    "convolution_layers": [([5], "whole numbers from 0 to 1 for num_hidden_layers 2"),
                           ([-1], "-1"), ([True], "True"), (["0"], "'0'"), (1, "1:"),
                           ([0, 1, 2], "0, 1, 2")],
    "shared_gate_layers": [([5], "from 0 to 1"), ([0.0], "0.0"), (None, "None")],
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_settings_that_would_build_another_model_are_refused(name):
    for value, words in WRONG[name]:
        with pytest.raises(InputError, match=rf"^{name} is .*{re.escape(words)}"):
            build_config(
                {"model_type": "prismlm_protot", "num_hidden_layers": 2, name: value}, 50, END
            )


@pytest.mark.usefixtures("unchecked")
def test_settings_changed_later_are_refused_when_the_model_is_built():
    config = build_config(FAMILIES["protot"] | {"hidden_size": 24}, VOCABULARY, END)
    config.temperature_mode = "multipy"
    with pytest.raises(InputError, match="temperature_mode is 'multipy'"):
        build_model(config)


@pytest.mark.usefixtures("unchecked")
def test_the_delta_rule_checks_its_settings_too():
    for settings, words in (
        ({"dropout": 2.0}, "dropout is 2.0"),
        ({"num_heads": 7}, "num_heads is 7: expected a divisor of hidden_size, which is 256"),
    ):
        with pytest.raises(InputError, match=words):
            build_config({"model_type": "prismlm_deltanet"} | settings, VOCABULARY, END)


def test_a_model_of_one_layer_has_the_defaults_and_its_checkpoint_comes_back(tmp_path):
    settings = {"model_type": "prismlm_protot", "num_channels": 4, "hidden_size": 24}
    model = build_model(build_config(settings | {"num_hidden_layers": 1}, VOCABULARY, END)).eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["convolution_layers"] == [0, 1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens(1, 5)).logits, model(tokens(1, 5)).logits)


def test_a_checkpoint_with_former_names_of_settings_is_refused(tmp_path):
    settings = {"model_type": "prismlm_protot", "num_channels": 4, "hidden_size": 24}
    build_model(build_config(settings, VOCABULARY, END)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("shared_gate_layers", "shared_routing_layers"))
    words = "shared_routing_layers is called shared_gate_layers now: rename it in config.json"
    with pytest.raises(InputError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("preset", ["protot", "deltanet", "signal-noise"])
def test_no_setting_is_taken_for_one_of_generation(preset):
    # transformers copies what has the name of one: a τ called temperature would sample with it.
    ours = set(build_config({"preset": preset}, 64, 0).to_dict())
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id"}
    everywhere = {"use_cache", "output_attentions", "output_hidden_states", "transformers_version"}
    assert ours & set(GenerationConfig().to_dict()) <= tokens | everywhere
