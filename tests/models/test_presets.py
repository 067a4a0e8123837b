"""Sizes of the presets against the tables of PRISM and ProtoT, on the meta device."""

import pytest
import torch

from prismlm.layers import PrototypeHead
from prismlm.models.presets import PRESETS, build_config, build_model

GPT2_VOCABULARY = 50257
SIZES = {
    "gpt2-small": (768, 12, 12, 124_439_808),
    "gpt2-medium": (1024, 16, 24, 354_823_168),
    "gpt2-large": (1280, 20, 36, 774_030_080),
    "gpt2-xl": (1600, 25, 48, 1_557_611_200),
}
PROTOTYPES = (4096, 8192, 16384, 32768)
# Parameters of the prototypes in millions, and in percent of the backbone's.
HEADS = {
    "gpt2-small": ((3.15, 2.5), (6.29, 5.1), (12.58, 10.1), (25.17, 20.2)),
    "gpt2-medium": ((4.19, 1.2), (8.39, 2.4), (16.78, 4.7), (33.55, 9.5)),
    "gpt2-large": ((5.24, 0.7), (10.49, 1.4), (20.97, 2.7), (41.94, 5.4)),
    "gpt2-xl": ((6.55, 0.4), (13.11, 0.8), (26.21, 1.7), (52.43, 3.4)),
}
# What the charts call the trained models, next to the rounded sizes of their backbones.
PUBLISHED = {
    "gpt2-small": (124, 130.29),
    "gpt2-medium": (355, 363.39),
    "gpt2-large": (774, 784.49),
    "gpt2-xl": (1558, 1571.11),
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


@pytest.mark.parametrize("name", HEADS)
def test_the_head_adds_what_the_source_says(name):
    width, _, _, count = SIZES[name]
    for prototypes, (millions, percent) in zip(PROTOTYPES, HEADS[name], strict=True):
        with torch.device("meta"):
            added = PrototypeHead(width, prototypes, 16).prototypes.numel()
        assert round(added / 1e6, 2) == millions
        assert round(100 * added / count, 1) == percent


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_models_have_8192_prototypes(name):
    """The published totals are the backbone rounded to a million plus d · 8192."""
    rounded, total = PUBLISHED[name]
    width, _, _, count = SIZES[name]
    assert round(count / 1e6) == rounded
    fitting = [k for k in PROTOTYPES if round(rounded + width * k / 1e6, 2) == total]
    assert fitting == [8192]


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
