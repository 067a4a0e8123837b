"""Sizes of the presets against the tables of PRISM and ProtoT, on the meta device."""

import pytest
import torch

from prismlm.models.presets import PRESETS, build_config, build_model

GPT2_VOCABULARY = 50257
SIZES = {
    "gpt2-small": (768, 12, 12, 124_439_808),
    "gpt2-medium": (1024, 16, 24, 354_823_168),
    "gpt2-large": (1280, 20, 36, 774_030_080),
    "gpt2-xl": (1600, 25, 48, 1_557_611_200),
}


def on_meta(settings, vocabulary):
    with torch.device("meta"):
        return build_model(build_config(settings, vocabulary, 0))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_gpt2_has_the_sizes_of_the_source(name):
    width, heads, layers, count = SIZES[name]
    model = on_meta({"preset": name}, GPT2_VOCABULARY)
    assert parameters(model) == count
    config = model.config
    assert (config.n_embd, config.n_head, config.n_layer) == (width, heads, layers)
    assert config.n_positions == 1024
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


# ProtoT, Table 13, at 16,000 tokens. All share embedding and output embedding; the table counts
# both, but for Mamba.
COMPARED = {"protot": 12_205_266, "llama": 12_938_496, "deltanet": 12_963_456, "mamba": 6_724_352}


@pytest.mark.parametrize("name", COMPARED)
def test_the_compared_models_have_the_sizes_of_the_source(name):
    settings = {"preset": name}
    if name == "protot":
        settings["paper_parameter_layout"] = True
    model = on_meta(settings, 16_000)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    twice = 0 if name == "mamba" else 16_000 * 256
    assert parameters(model) + twice == COMPARED[name]


def test_protot_without_what_nothing_uses():
    """W and τ of layer 0 and four convolutions: 256² + 1 + 4·5·128 fewer."""
    model = on_meta({"preset": "protot", "tie_word_embeddings": False}, 16_000)
    assert parameters(model) == 12_137_169 == 12_205_266 - 256**2 - 1 - 4 * 5 * 128
    full = {"preset": "protot", "tie_word_embeddings": False, "paper_parameter_layout": True}
    assert parameters(on_meta(full, 16_000)) == 12_205_266
    trained = [p for p in on_meta(full, 16_000).parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 12_137_169


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("llama-laptop", 1.59),
        ("gpt2-laptop", 1.75),
        ("mamba-laptop", 1.55),
        ("llama-small", 9.99),
        ("protot-laptop", 1.42),
        ("signal-noise-laptop", 1.42),
        ("signal-noise-laptop-wide", 1.58),
    ],
)
def test_laptop_presets_have_the_sizes_the_docs_give(name, millions):
    assert parameters(on_meta({"preset": name}, 4096)) == pytest.approx(millions * 1e6, rel=0.005)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_takes_the_vocabulary_it_is_given_and_other_keys(name):
    model = on_meta({"preset": name}, 777)
    assert model.get_input_embeddings().weight.shape[0] == 777
    assert model.get_output_embeddings().weight.shape[0] == 777
    assert model.config.eos_token_id == 0
    fewer = on_meta({"preset": name, "num_hidden_layers": 1}, 777)
    assert parameters(fewer) < parameters(model)


def test_prism_has_the_size_its_source_names_with_an_output_matrix_of_its_own():
    sizes = {name: parameters(on_meta({"preset": name}, 50257)) for name in PRESETS if "-" in name}
    assert sizes["signal-noise-untied"] == pytest.approx(50e6, rel=0.02)
    assert sizes["gpt2-50m"] == pytest.approx(sizes["signal-noise-untied"], rel=0.02)
    assert sizes["gpt2-22m"] == pytest.approx(22e6, rel=0.04)
    tied = on_meta({"preset": "signal-noise"}, 50257)
    # Per layer R·d² of attention, 8 d² of the MLP and two norms; then the last norm.
    layer = 2 * 512**2 + 8 * 512**2 + 2 * 512
    assert parameters(tied) == 50257 * 512 + 8 * layer + 512
    assert sizes["signal-noise-untied"] - parameters(tied) == 8 * 2 * 512**2
