"""Attention weights read while a model runs."""

import contextvars
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from prismlm.errors import InputError
from prismlm.models.attention import (
    attention_form,
    attention_layers,
    head_groups,
    head_writes,
    reading_attention,
)
from prismlm.models.decoders.protot import ProtoTConfig, ProtoTForCausalLM
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from tests.helpers.families import FAMILIES, V
from tests.helpers.head_models import make_signal_noise
from tests.helpers.mixer_models import make_model


class OwnFormConfig(LlamaConfig):
    """Has a property of its own over the form of attention, as HRM-Text's configuration does."""

    @property
    def _attn_implementation(self):
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value):
        PreTrainedConfig._attn_implementation.__set__(self, value)


def signal_noise(**settings):
    torch.manual_seed(0)
    config = SignalNoiseConfig(
        vocab_size=19, hidden_size=16, num_hidden_layers=2, head_size=4, **settings
    )
    return SignalNoiseForCausalLM(config).eval()


def read_all(model, ids, **inputs):
    found = {}
    with (
        torch.no_grad(),
        reading_attention(model, lambda layer, weights: found.__setitem__(layer, weights.clone())),
    ):
        outputs = model(ids, **inputs)
    return found, outputs


def test_weights_of_signal_and_noise_heads_give_the_layers_output():
    model = signal_noise(noise_weight=0.3)
    ids = torch.randint(0, 19, (2, 7))
    layer = model.model.layers[1].attention
    kept = {}
    hook = layer.register_forward_hook(
        lambda module, args, output: kept.update(z=args[0], out=output)
    )
    found, _ = read_all(model, ids)
    hook.remove()
    weights = found[1]
    assert weights.shape == (2, 8, 7, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 8, 7), atol=1e-6)
    assert not weights.triu(1).any()
    values = kept["out"].projections
    heads = weights @ values
    heads[:, 4:] *= -0.3
    merged = heads.transpose(1, 2).reshape(2, 7, -1)
    expected = layer.step * merged @ layer.projection.weight
    assert torch.allclose(expected, kept["out"].output, atol=1e-6)


def test_weights_with_padding_and_a_cache_are_those_without():
    model = signal_noise()
    ids = torch.randint(1, 19, (1, 6))
    whole, _ = read_all(model, ids)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), ids], 1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    found, _ = read_all(model, padded, attention_mask=mask)
    for layer in (0, 1):
        assert torch.allclose(found[layer][:, :, 2:, 2:], whole[layer], atol=1e-6)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    later, _ = read_all(model, ids[:, 4:], past_key_values=cache)
    assert torch.allclose(later[1], whole[1][:, :, 4:], atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", LlamaConfig, OwnFormConfig])
def test_weights_of_a_hugging_face_model_are_its_own(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=19, n_embd=16, n_layer=2, n_head=4)).eval()
    else:
        config = kind(
            vocab_size=19,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 19, (2, 7))
    before = model.config._attn_implementation
    found, outputs = read_all(model, ids)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(ids, output_attentions=True).attentions
    for layer, weights in enumerate(theirs):
        assert torch.equal(found[layer], weights)
    assert [tuple(group) for group in head_groups(model)] == [("attention", 0, 4)]
    with torch.no_grad():
        assert torch.allclose(outputs.logits, model(ids).logits, atol=1e-6)


def test_groups_and_layers_that_are_not_there():
    model = signal_noise()
    assert [tuple(group) for group in head_groups(model)] == [("signal", 0, 4), ("noise", 4, 8)]
    assert len(attention_layers(model)) == 2
    with pytest.raises(InputError, match="no layer 2"), reading_attention(model, print, layers=[2]):
        pass
    protot = ProtoTForCausalLM(
        ProtoTConfig(vocab_size=19, hidden_size=16, num_hidden_layers=1, num_channels=4)
    )
    with pytest.raises(InputError, match="no attention heads"):
        attention_layers(protot)


def test_one_layer_is_read_when_one_is_asked_for():
    model, found = signal_noise(), []
    with reading_attention(model, lambda layer, _: found.append(layer), layers=[1]):
        model(torch.tensor([[1, 2, 3]]))
    model(torch.tensor([[1, 2, 3]]))
    assert found == [1]


def test_a_form_holds_in_its_block_and_for_who_opened_it():
    first, second = (
        GPT2LMHeadModel(GPT2Config(vocab_size=19, n_embd=16, n_layer=1, n_head=4)) for _ in "ab"
    )
    own, found = first.config._attn_implementation, []

    def look():
        found.append(first.config._attn_implementation)

    with attention_form(first):
        with attention_form(first, "sdpa"), attention_form(first):
            assert first.config._attn_implementation == "sdpa"
        assert first.config._attn_implementation == "eager"
        copied = contextvars.copy_context()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    # What still has the block's context after it, as a task that was begun in it.
    with attention_form(second):
        copied.run(look)
        look()
    assert found == [own] * 3


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
