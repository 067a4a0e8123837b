"""What a channel or a head does at each position."""

import pytest
import torch

from prismlm.instruments.channels.layer_metrics import value_norms
from tests.helpers.mixer_models import VOCABULARY, make_llama


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_value_norms_are_those_of_the_value_heads(kv_heads):
    llama = make_llama(VOCABULARY, kv_heads)
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    found = value_norms(llama, ids)
    assert [norms.shape for norms in found] == [(2, 9, kv_heads)] * 2
    states = llama(ids, output_hidden_states=True).hidden_states
    for layer, norms in zip(llama.model.layers, found, strict=True):
        values = layer.self_attn.v_proj(layer.input_layernorm(states[layer.self_attn.layer_idx]))
        heads = values.reshape(2, 9, kv_heads, 6)
        torch.testing.assert_close(norms, heads.square().sum(-1).sqrt())
        assert not layer.self_attn.v_proj._forward_hooks
