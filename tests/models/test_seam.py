"""The seam on tiny random decoders of several families."""

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
IDS = torch.arange(12).reshape(2, 6)


def build(family="llama"):
    torch.manual_seed(0)
    settings = {"model_type": family, **FAMILIES[family]}
    return build_model(build_config(settings, vocab_size=97, eos_token_id=0)).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_z_w_and_the_logit_map_reproduce_the_logits(family):
    model = build(family)
    logit_map = LogitMap.of(model)
    assert logit_map == EXPECTED.get(family, LogitMap())
    assert verify_logit_map(model, logit_map) < 1e-5
    assert from_json(LogitMap, asdict(logit_map), "logit_map") == logit_map
    before = model(input_ids=IDS).logits
    with capture(model) as captured:
        logits = model(input_ids=IDS).logits
    assert torch.equal(logits, before)
    embedding = output_embedding(model)
    rebuilt = nn.functional.linear(captured.z, embedding.weight, embedding.bias)
    torch.testing.assert_close(logit_map(rebuilt), logits, atol=1e-5, rtol=1e-5)
    with capture(model, logits=False) as states:
        output = model(input_ids=IDS)
    assert torch.equal(states.z, captured.z)
    assert states.embedded is None
    assert output.logits.numel() == 0
    with pytest.raises(RuntimeError, match="stop"), capture(model, logits=False):
        raise RuntimeError("stop")
    assert torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize(
    "wrong", [LogitMap(scale=2.0), LogitMap(softcap=0.01), LogitMap(bias=True)]
)
def test_a_wrong_map_is_refused(wrong):
    with pytest.raises(FormatError, match="does not reproduce the logits of LlamaForCausalLM"):
        verify_logit_map(build(), wrong)


def test_a_model_without_an_output_embedding():
    with pytest.raises(InputError, match=r"no output embedding.*language modelling head"):
        output_embedding(build().model)


class Int8Linear(nn.Linear):
    """Has integers and a scale per row instead of W."""

    def __init__(self, linear):
        super().__init__(*reversed(linear.weight.shape), bias=False)
        del self.weight
        scale = linear.weight.detach().abs().amax(1) / 127
        rounded = (linear.weight.detach() / scale[:, None]).round()
        self.register_buffer("weight", rounded.to(torch.int8))
        self.register_buffer("scales", scale)

    def forward(self, z):
        return z @ (self.weight * self.scales[:, None]).T


def test_quantised_output_embeddings():
    model = build()
    weight = model.lm_head.weight.detach()
    model.lm_head = Int8Linear(model.lm_head)
    model(input_ids=IDS)
    with pytest.raises(InputError, match=r"lm_head of LlamaForCausalLM .* Tensor of int8") as error:
        LogitMap.of(model)
    assert "modules_to_not_convert=['lm_head']" in str(error.value)
    model = build()
    model.lm_head.weight = nn.Parameter(TwoTensor(weight / 2, weight / 2))
    with pytest.raises(InputError, match=r"is quantised \(its weight is TwoTensor"):
        output_embedding(model)


def test_an_embedding_that_adds_to_its_product():
    model = build()
    extra = nn.Linear(32, 97, bias=False)
    handle = model.lm_head.register_forward_hook(lambda _, args, output: output + extra(*args))
    with pytest.raises(FormatError, match="does not reproduce the logits"):
        verify_logit_map(model, LogitMap())
    handle.remove()
    verify_logit_map(model, LogitMap())
