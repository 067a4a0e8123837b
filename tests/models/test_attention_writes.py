"""What heads write: what is missing without each, in families that name things otherwise."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from prismlm.errors import InputError
from prismlm.models.attention import attention_layers, head_writes
from tests.helpers.families import FAMILIES, V
from tests.helpers.head_models import make_signal_noise
from tests.helpers.mixer_models import make_model

IDS = torch.randint(1, V, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 7, dtype=torch.bool)


def built(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "phi"])
def test_a_head_writes_what_is_missing_without_it(family):
    model = built(family)
    layer = attention_layers(model)[0]
    merging = getattr(layer, {"gpt2": "c_proj", "phi": "dense"}.get(family, "o_proj"))
    seen = {}
    merging.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output))
    found = head_writes(model, IDS, MASK)
    assert len(found) == 2
    assert found[0].shape == (2, 7, 2)
    x, y = seen["x"], seen["y"]
    width = x.shape[-1] // 2
    for head in range(2):
        without = x.clone()
        without[..., head * width : (head + 1) * width] = 0
        with torch.no_grad():
            expected = (y - merging.forward(without)).norm(dim=-1)
        assert torch.allclose(found[0][..., head], expected, rtol=1e-4, atol=1e-5)


def test_bf16_is_read_in_float32_and_padding_changes_nothing():
    model = built("llama").to(torch.bfloat16)
    assert head_writes(model, IDS, MASK)[0].dtype == torch.float32
    model = built("llama")
    whole = head_writes(model, IDS, MASK)[1]
    padded = torch.cat([IDS, torch.zeros(2, 3, dtype=torch.int64)], 1)
    mask = torch.cat([MASK, torch.zeros(2, 3, dtype=torch.bool)], 1)
    assert torch.allclose(head_writes(model, padded, mask)[1][:, :7], whole, atol=1e-5)


def test_heads_that_cannot_be_told_apart_are_refused():
    with pytest.raises(InputError, match="has no attention heads to read"):
        head_writes(built("mamba"), IDS, MASK)
    with pytest.raises(InputError, match="has no attention heads to read"):
        head_writes(make_model(V), IDS, MASK)
    with pytest.raises(InputError, match=r"cannot be separated: .*signal/noise.*λ"):
        head_writes(make_signal_noise(V), IDS, MASK)
    model = built("llama")
    attention_layers(model)[1].o_proj = torch.nn.Sequential(attention_layers(model)[1].o_proj)
    with pytest.raises(InputError, match=r"of layer 1 .*LlamaAttention has no plain matrix"):
        head_writes(model, IDS, MASK)
    del attention_layers(model)[0].o_proj
    with pytest.raises(InputError, match=r"of layer 0 .*LlamaAttention has no plain matrix"):
        head_writes(model, IDS, MASK)
