"""PEFT adapters on our decoders: a matrix that is used twice is adapted twice."""

import copy

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

from prismlm.probes.heads.spectra import signal_noise_layers
from tests.helpers.mixer_models import make_model
from tests.helpers.own_models import VOCABULARY, own_model, tokens

KINDS = {
    "LoRA": (LoraConfig, {"r": 3, "init_lora_weights": False}),
    "DoRA": (LoraConfig, {"r": 3, "init_lora_weights": False, "use_dora": True}),
    "IA3": (IA3Config, {"feedforward_modules": [], "init_ia3_weights": False}),
}


def build(family):
    return own_model(family) if family == "source" else make_model(VOCABULARY)


def adapted(model, kind, targets):
    torch.manual_seed(1)
    config, settings = KINDS[kind]
    wrapped = get_peft_model(model, config(target_modules=targets, **settings)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return wrapped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("family", "targets"),
    [("source", ["projection"]), ("protot", ["value_projection", "output_projection"])],
)
@torch.no_grad()
def test_unmerged_merged_and_reloaded_adapters_are_the_same(family, targets, kind, tmp_path):
    ids, plain = tokens(2, 9), build(family)
    wrapped = adapted(copy.deepcopy(plain), kind, targets)
    unmerged = wrapped(ids).logits
    assert (unmerged - plain(ids).logits).abs().max() > 0.05
    wrapped.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    close = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(again(ids).logits, unmerged, **close)
    torch.testing.assert_close(wrapped.merge_and_unload()(ids).logits, unmerged, **close)


def test_matrices_include_the_adapter():
    x = torch.randn(1, 3, 24)
    wrapped = adapted(build("source"), "DoRA", ["projection"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    for actual, expected in zip(*map(signal_noise_layers, (wrapped, merged)), strict=True):
        torch.testing.assert_close(actual.dictionary(x), expected.dictionary(x))
    wrapped = adapted(build("protot"), "LoRA", ["output_projection"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    layers = zip(wrapped.get_base_model().model.layers, merged.model.layers, strict=True)
    for actual, expected in layers:
        torch.testing.assert_close(actual.mixer.output_map, expected.mixer.output_map)
