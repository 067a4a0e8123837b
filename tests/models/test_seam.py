"""The seam on real decoders of several families, tiny and randomly initialised."""

from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from prismlm.errors import FormatError, InputError
from prismlm.files import from_json
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import (
    LogitMap,
    capture,
    decoder_and_embeddings,
    output_embedding,
    verify_logit_map,
)

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 16},
    "gemma2": SMALL | {"head_dim": 16},
    "granite": SMALL | {"logits_scaling": 8.0},
    "cohere": SMALL,
    "phi": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2},
}
EXPECTED = {
    "gemma2": LogitMap(softcap=30.0),
    "granite": LogitMap(scale=0.125),
    "cohere": LogitMap(scale=0.0625),
    "phi": LogitMap(bias=True),
}


def decoder(family):
    torch.manual_seed(0)
    settings = {"model_type": family, **FAMILIES[family]}
    return build_model(build_config(settings, vocab_size=97, eos_token_id=0)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_logit_map_is_found_and_reproduces_the_logits(family):
    model = decoder(family)
    logit_map = LogitMap.of(model)
    assert logit_map == EXPECTED.get(family, LogitMap())
    assert verify_logit_map(model, logit_map) < 1e-5
    assert from_json(LogitMap, asdict(logit_map), "logit_map") == logit_map


@pytest.mark.parametrize("family", FAMILIES)
def test_z_times_w_is_what_the_embedding_gives(family):
    model = decoder(family)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad(), capture(model) as seen:
        logits = model(input_ids=ids).logits
    embedding = output_embedding(model)
    rebuilt = nn.functional.linear(seen.z, embedding.weight, embedding.bias)
    torch.testing.assert_close(LogitMap.of(model)(rebuilt), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_states_without_logits(family):
    model = decoder(family)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        with capture(model) as full:
            model(input_ids=ids)
        with capture(model, logits=False) as bare:
            output = model(input_ids=ids)
    assert torch.equal(bare.z, full.z)
    assert bare.embedded is None
    assert output.logits.numel() == 0


def test_watching_changes_no_bit_and_leaves_no_hook():
    model = decoder("llama")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with capture(model):
            during = model(input_ids=ids).logits
        with pytest.raises(RuntimeError, match="stop"), capture(model, logits=False):
            raise RuntimeError("stop")
        after = model(input_ids=ids).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "wrong", [LogitMap(scale=2.0), LogitMap(softcap=0.01), LogitMap(bias=True)]
)
def test_a_map_that_is_not_the_models_is_refused(wrong):
    with pytest.raises(FormatError, match="does not reproduce the logits of LlamaForCausalLM"):
        verify_logit_map(decoder("llama"), wrong)


def test_a_model_without_an_output_embedding():
    with pytest.raises(InputError, match=r"no output embedding.*: embed_tokens \(Embedding\)"):
        output_embedding(decoder("llama").model)


class Int8Linear(nn.Linear):
    """Holds whole numbers and a scale for each row in place of W."""

    def __init__(self, linear):
        super().__init__(*reversed(linear.weight.shape), bias=False)
        del self.weight
        scale = linear.weight.detach().abs().amax(1) / 127
        whole = (linear.weight.detach() / scale[:, None]).round()
        self.register_buffer("weight", whole.to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, z):
        return z @ (self.weight * self.scales[:, None]).T


def test_a_quantised_output_embedding():
    model = decoder("llama")
    model.lm_head = Int8Linear(model.lm_head)
    model(input_ids=torch.arange(4)[None])
    with pytest.raises(InputError, match=r"lm_head of LlamaForCausalLM .* Tensor of int8") as said:
        LogitMap.of(model)
    assert "modules_to_not_convert=['lm_head']" in str(said.value)


def test_a_weight_that_holds_others_in_place_of_w():
    model = decoder("llama")
    half = model.lm_head.weight.detach() / 2
    model.lm_head.weight = nn.Parameter(TwoTensor(half, half))
    with pytest.raises(InputError, match=r"is quantised \(its weight is TwoTensor"):
        output_embedding(model)


def test_an_embedding_that_does_more_than_its_weight_says():
    model = decoder("llama")
    added = nn.Linear(32, 97, bias=False)
    handle = model.lm_head.register_forward_hook(lambda _, given, output: output + added(*given))
    with pytest.raises(FormatError, match="does not reproduce the logits"):
        verify_logit_map(model, LogitMap())
    handle.remove()
    verify_logit_map(model, LogitMap())


def test_a_decoder_whose_embeddings_have_another_name():
    model = decoder("llama")
    embeddings = model.get_input_embeddings()
    model._modules = {"shared": embeddings, **model._modules}
    found = decoder_and_embeddings(model, decoder="model", embeddings="shared")
    assert found == (model.model, embeddings)
