"""The seam on tiny random decoders of several families."""

from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from prismlm.errors import FormatError, InputError, NotFiniteError
from prismlm.files import from_json
from prismlm.models.seam import LogitMap, capture, output_embedding, verify_logit_map
from tests.helpers.families import FAMILIES, MAPS, WIDTH, V, build

IDS = torch.arange(12).reshape(2, 6)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "int8" not in name])
@torch.no_grad()
def test_z_w_and_the_logit_map_reproduce_the_logits(family):
    model = build(family)
    logit_map = LogitMap.of(model)
    assert logit_map == MAPS.get(family, LogitMap())
    half = family == "llama-bf16"
    assert verify_logit_map(model, logit_map) < (2e-2 if half else 1e-5)
    assert from_json(LogitMap, asdict(logit_map), "logit_map") == logit_map
    before = model(input_ids=IDS).logits
    with capture(model) as captured:
        logits = model(input_ids=IDS).logits
    assert torch.equal(logits, before)
    embedding = output_embedding(model)
    rebuilt = nn.functional.linear(captured.z, embedding.weight, embedding.bias)
    close = {"atol": 1e-2, "rtol": 1e-2} if half else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(logit_map(rebuilt), logits, **close)
    with capture(model, logits=False) as states:
        output = model(input_ids=IDS)
    assert torch.equal(states.z, captured.z)
    assert states.embedded is None
    assert output.logits.numel() == 0


def test_a_wrong_map_an_embedding_that_adds_and_a_diverged_model_are_refused():
    model = build("llama")
    words = "does not reproduce the logits of LlamaForCausalLM"
    for wrong in (LogitMap(scale=2.0), LogitMap(bias=True)):
        with pytest.raises(FormatError, match=words):
            verify_logit_map(model, wrong)
    extra = nn.Linear(WIDTH, V, bias=False)
    handle = model.lm_head.register_forward_hook(lambda _, args, output: output + extra(*args))
    with pytest.raises(FormatError, match=words):
        verify_logit_map(model, LogitMap())
    handle.remove()
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(NotFiniteError, match="logits of LlamaForCausalLM are not finite"):
        verify_logit_map(model, LogitMap())


def test_a_missing_and_a_quantised_output_embedding():
    model = build("llama")
    with pytest.raises(InputError, match=r"no output embedding.*language modelling head"):
        output_embedding(model.model)
    half = model.lm_head.weight.detach() / 2
    model.lm_head.weight = nn.Parameter(TwoTensor(half, half))
    with pytest.raises(InputError, match=r"is quantised \(its weight is TwoTensor") as error:
        LogitMap.of(model)
    assert "modules_to_not_convert=['lm_head']" in str(error.value)
