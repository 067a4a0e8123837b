"""Adapters of PEFT on decoders of our own: a matrix that is used twice is adapted twice."""

import copy

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    OFTConfig,
    PeftModel,
    get_peft_model,
)

from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from prismlm.probes.heads.spectra import signal_noise_layers
from tests.helpers.mixer_models import make_model

VOCAB = 50
KINDS = {
    "LoRA": lambda targets: LoraConfig(r=3, target_modules=targets, init_lora_weights=False),
    "DoRA": lambda targets: LoraConfig(
        r=3, target_modules=targets, init_lora_weights=False, use_dora=True
    ),
    "IA3": lambda targets: IA3Config(
        target_modules=targets, feedforward_modules=[], init_ia3_weights=False
    ),
    "OFT": lambda targets: OFTConfig(
        r=0, oft_block_size=4, target_modules=targets, init_weights=False
    ),
}


def signal_noise():
    torch.manual_seed(0)
    config = SignalNoiseConfig(
        vocab_size=VOCAB, hidden_size=24, head_size=6, num_hidden_layers=2, initializer_range=0.3
    )
    return SignalNoiseForCausalLM(config).eval()


def tokens(rows=2, length=9):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))


def adapted(model, kind, targets):
    torch.manual_seed(1)
    wrapped = get_peft_model(model, KINDS[kind](targets)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return wrapped


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("build", "targets"),
    [
        (signal_noise, ["projection"]),
        (lambda: make_model(VOCAB).eval(), ["value_projection", "output_projection"]),
    ],
    ids=["signal/noise", "ProtoT"],
)
@torch.no_grad()
def test_unmerged_merged_and_reloaded_are_one_model(build, targets, kind, tmp_path):
    ids, plain = tokens(), build()
    wrapped = adapted(copy.deepcopy(plain), kind, targets)
    unmerged = wrapped(ids).logits
    assert (unmerged - plain(ids).logits).abs().max() > 0.05
    wrapped.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path).eval()
    close = {"atol": 2e-5, "rtol": 1e-4}
    torch.testing.assert_close(again(ids).logits, unmerged, **close)
    torch.testing.assert_close(wrapped.merge_and_unload()(ids).logits, unmerged, **close)


def test_what_reads_the_matrices_reads_those_in_force():
    x = torch.randn(1, 3, 24)
    wrapped = adapted(signal_noise(), "DoRA", ["projection"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    for own, whole in zip(*map(signal_noise_layers, (wrapped, merged)), strict=True):
        torch.testing.assert_close(own.dictionary(x), whole.dictionary(x))
    wrapped = adapted(make_model(VOCAB).eval(), "LoRA", ["output_projection"])
    merged = copy.deepcopy(wrapped).merge_and_unload()
    layers = zip(wrapped.get_base_model().model.layers, merged.model.layers, strict=True)
    for own, whole in layers:
        torch.testing.assert_close(own.mixer.output_map, whole.mixer.output_map)
