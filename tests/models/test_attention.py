"""Attention weights and head outputs read while a model runs."""

import contextvars
import threading

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.attention import (
    attention_form,
    attention_layers,
    head_groups,
    head_writes,
    reading_attention,
)
from tests.helpers.families import V, build
from tests.helpers.mixer_models import make_llama, make_model
from tests.helpers.small_models import make_gpt2, make_signal_noise

IDS = torch.randint(1, V, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 7, dtype=torch.bool)


@torch.no_grad()
def read_all(model, ids, **inputs):
    weights = {}
    with reading_attention(model, lambda layer, own: weights.__setitem__(layer, own.clone())):
        outputs = model(ids, **inputs)
    return weights, outputs


def test_weights_of_signal_and_noise_heads_give_the_layers_output():
    model = make_signal_noise(19, noise_weight=0.3)
    layer, outputs = model.model.layers[1].attention, []
    hook = layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    weights = read_all(model, torch.randint(0, 19, (2, 7)))[0][1]
    hook.remove()
    assert weights.shape == (2, 8, 7, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 8, 7), atol=1e-6)
    assert not weights.triu(1).any()
    heads = weights @ outputs[0].projections
    heads[:, 4:] *= -0.3
    merged = heads.transpose(1, 2).reshape(2, 7, -1)
    expected = layer.step * merged @ layer.projection.weight
    assert torch.allclose(expected, outputs[0].output, atol=1e-6)


def test_weights_with_padding_and_with_a_cache_are_the_same():
    model = make_signal_noise(19)
    ids = torch.randint(1, 19, (1, 6))
    plain, _ = read_all(model, ids)
    padded = torch.cat([torch.zeros(1, 2, dtype=torch.int64), ids], 1)
    weights, _ = read_all(model, padded, attention_mask=(padded > 0).long())
    for layer in (0, 1):
        assert torch.allclose(weights[layer][:, :, 2:, 2:], plain[layer], atol=1e-6)
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    later, _ = read_all(model, ids[:, 4:], past_key_values=cache)
    assert torch.allclose(later[1], plain[1][:, :, 4:], atol=1e-6)


@pytest.mark.parametrize("make", [make_gpt2, make_llama])
def test_weights_of_hugging_face_models_are_their_output_attentions(make):
    model, ids = make(19), torch.randint(0, 19, (2, 7))
    before = model.config._attn_implementation
    weights, outputs = read_all(model, ids)
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(ids, output_attentions=True)
    for layer, expected in enumerate(eager.attentions):
        assert torch.equal(weights[layer], expected)
    assert [tuple(group) for group in head_groups(model)] == [("attention", 0, 4)]
    assert torch.allclose(outputs.logits, eager.logits, atol=1e-6)


def test_groups_and_selected_layers():
    model, layers = make_signal_noise(19), []
    assert [tuple(group) for group in head_groups(model)] == [("signal", 0, 4), ("noise", 4, 8)]
    assert len(attention_layers(model)) == 2
    with reading_attention(model, lambda layer, _: layers.append(layer), layers=[1]):
        model(torch.tensor([[1, 2, 3]]))
    model(torch.tensor([[1, 2, 3]]))
    assert layers == [1]
    with pytest.raises(InputError, match="no layer 2"), reading_attention(model, print, layers=[2]):
        pass


@torch.no_grad()
def test_an_implementation_applies_to_its_block_and_thread():
    """Another thread in the middle of a pass would lose the mask of the implementation before."""
    model, ids, seen = make_llama(19), IDS % 19, []
    original, expected = model.config._attn_implementation, model(ids).logits
    inside, entered = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        entered.wait(10)

    handle = model.model.layers[0].register_forward_hook(wait)
    thread = threading.Thread(target=lambda: seen.append(model(ids).logits))
    thread.start()
    inside.wait(10)
    with attention_form(model):
        with attention_form(model, "sdpa"), attention_form(model):
            assert model.config._attn_implementation == "sdpa"
        assert model.config._attn_implementation == "eager"
        copied = contextvars.copy_context()
        entered.set()
        thread.join()
    handle.remove()
    torch.testing.assert_close(seen[0], expected)
    # A copy of the context that outlives the block, as in a task that was started in it.
    with attention_form(make_gpt2()):
        assert copied.run(lambda: model.config._attn_implementation) == original


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi"])
@torch.no_grad()
def test_the_write_of_a_head_is_the_difference_without_it(family):
    model = build(family)
    layer, calls = attention_layers(model)[0], []
    output = getattr(layer, {"gpt2": "c_proj", "phi": "dense"}.get(family, "o_proj"))
    output.register_forward_hook(lambda module, args, y: calls.append((args[0], y)))
    writes = head_writes(model, IDS, MASK)
    assert len(writes) == 2
    assert writes[0].shape == (2, 7, 2)
    x, y = calls[0]
    width = x.shape[-1] // 2
    for head in range(2):
        without = x.clone()
        without[..., head * width : (head + 1) * width] = 0
        expected = (y - output.forward(without)).norm(dim=-1)
        assert torch.allclose(writes[0][..., head], expected, rtol=1e-4, atol=1e-5)


def test_writes_are_float32_and_do_not_depend_on_padding():
    assert head_writes(build("llama").bfloat16(), IDS, MASK)[0].dtype == torch.float32
    model = build("llama")
    padded = torch.cat([IDS, torch.zeros(2, 3, dtype=torch.int64)], 1)
    writes = head_writes(model, padded, padded > 0)[1][:, :7]
    assert torch.allclose(writes, head_writes(model, IDS, MASK)[1], atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build("mamba"), "'mamba' has no attention heads"),
        (lambda: make_model(V), "'prismlm_protot' has no attention heads"),
        (lambda: make_signal_noise(V), "cannot be separated"),
    ],
)
def test_heads_that_cannot_be_separated(make, words):
    with pytest.raises(InputError, match=words):
        head_writes(make(), IDS, MASK)
