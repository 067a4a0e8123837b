"""Sizes of the presets against the tables of PRISM and ProtoT, on the meta device."""

import pytest
import torch

from prismlm.models.presets import PRESETS, build_config, build_model


def on_meta(preset, vocabulary, **settings):
    with torch.device("meta"):
        return build_model(build_config({"preset": preset} | settings, vocabulary, 0))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "vocabulary", "count"),
    [
        ("gpt2-small", 50257, 124_439_808),
        ("gpt2-medium", 50257, 354_823_168),
        ("gpt2-large", 50257, 774_030_080),
        ("gpt2-xl", 50257, 1_557_611_200),
        ("llama", 16_000, 12_938_496 - 16_000 * 256),
        ("deltanet", 16_000, 12_963_456 - 16_000 * 256),
        ("mamba", 16_000, 6_724_352),
    ],
)
def test_sizes_of_the_sources(name, vocabulary, count):
    """PRISM's GPT-2; ProtoT's Table 13, which counts embeddings twice, except for Mamba."""
    model = on_meta(name, vocabulary)
    assert parameters(model) == count
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_protot_with_and_without_unused_parameters():
    """W and τ of layer 0 and four convolutions: 256² + 1 + 4·5·128."""
    unused = 256**2 + 1 + 4 * 5 * 128
    assert parameters(on_meta("protot", 16_000, tie_word_embeddings=False)) == 12_205_266 - unused
    model = on_meta("protot", 16_000, tie_word_embeddings=False, paper_parameter_layout=True)
    assert parameters(model) == 12_205_266
    assert sum(p.numel() for p in model.parameters() if not p.requires_grad) == unused


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_accepts_a_vocabulary_and_other_settings(name):
    model = on_meta(name, 777)
    assert model.get_output_embeddings().weight.shape[0] == 777
    assert model.config.eos_token_id == 0
    assert parameters(on_meta(name, 777, num_hidden_layers=1)) < parameters(model)


def test_prism_and_its_baselines_have_the_sizes_of_the_source():
    untied = parameters(on_meta("signal-noise-untied", 50257))
    assert untied == pytest.approx(50e6, rel=0.02)
    assert parameters(on_meta("gpt2-50m", 50257)) == pytest.approx(untied, rel=0.02)
    assert parameters(on_meta("gpt2-22m", 50257)) == pytest.approx(22e6, rel=0.04)
    # Per layer R·d² of attention, 8 d² of the MLP and two norms; then the last norm.
    tied = 50257 * 512 + 8 * (2 * 512**2 + 8 * 512**2 + 2 * 512) + 512
    assert parameters(on_meta("signal-noise", 50257)) == tied == untied - 8 * 2 * 512**2
