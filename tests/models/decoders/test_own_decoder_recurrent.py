"""Recurrent decoders: states, masks, evidence, precision."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils._pytree import tree_leaves

from prismlm.errors import InputError
from prismlm.models.decoders.own_decoder import RecurrentCache
from prismlm.models.decoders.protot import ProtoTConfig
from prismlm.ops.delta_rule import naive as naive_rule
from prismlm.ops.prototype_mixer import naive as naive_mean
from tests.helpers.own_models import CLOSE, RECURRENT, gradients, own_model, tokens


@pytest.fixture(scope="module", params=RECURRENT)
def model(request):
    return own_model(request.param)


@torch.no_grad()
def greedy(model, ids, steps):
    """Continue without a cache and without generate."""
    for _ in range(steps):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1)[:, None]], 1)
    return ids


def test_generation_in_pieces_and_from_a_cache_equals_the_uncached_loop(model):
    ids = tokens(1, 11)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = model.generate(ids, prefill_chunk_size=4, max_new_tokens=8, **options)
    assert torch.equal(whole, greedy(model, ids, 8))
    cache = RecurrentCache(model.config.num_hidden_layers)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=3, **options)
    more = torch.cat([first, tokens(1, 4, seed=5)], 1)
    # Without a mask, generate would treat pad_token_id as padding.
    inputs = {"past_key_values": cache, "attention_mask": torch.ones_like(more)}
    continued = model.generate(more, max_new_tokens=8, **inputs, **options)
    assert torch.equal(continued, greedy(model, more, 8))


@torch.no_grad()
def test_a_mask_covers_the_new_positions_or_the_cache_too(model):
    ids = tokens(2, 9)
    whole = model(ids).logits
    mask = torch.ones(2, 12, dtype=torch.int64)
    cache = model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True).past_key_values
    for wrong in (1, 6, 10):
        with pytest.raises(InputError, match=r"expected \[2, 3\], or \[2, 9\] including the"):
            model(ids[:, 6:], attention_mask=mask[:, :wrong], past_key_values=cache)
    for width in (3, 9):
        rest = {"attention_mask": mask[:, :width], "past_key_values": copy.deepcopy(cache)}
        torch.testing.assert_close(model(ids[:, 6:], **rest).logits, whole[:, 6:], **CLOSE)
    with pytest.raises(InputError, match=r"position_ids are \[6\]: expected \[2, 6\], or \[1, 6\]"):
        model(ids[:, :6], position_ids=torch.arange(6))
    with pytest.raises(InputError, match=r"^2 tokens cannot be removed"):
        cache.crop(-2)


def test_a_float64_model_is_exact(model, monkeypatch):
    """Compared with the naive forms."""
    exact = copy.deepcopy(model).double()
    # Longer than a block of 32 positions, or a chunk, and no multiple of one.
    monkeypatch.setattr("prismlm.ops.delta_rule.chunked.CHUNK", 16)
    ids = tokens(2, 41)
    output = exact(ids, output_gates=True)
    assert {gates.dtype for gates in tree_leaves(output.gates)} == {torch.float64}
    logits, fast = output.logits, gradients(exact, input_ids=ids, labels=ids)
    fast = {name: gradient.clone() for name, gradient in fast.items()}
    monkeypatch.setattr("prismlm.layers.prototype_mixer.prefix_mean", naive_mean.prefix_mean)
    monkeypatch.setattr("prismlm.layers.delta_mixer.delta_rule", naive_rule.delta_rule)
    torch.testing.assert_close(exact(ids).logits, logits, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients(exact, input_ids=ids, labels=ids).items():
        assert (fast[name] - gradient).norm() <= 1e-12 * gradient.norm(), name


@torch.no_grad()
def test_the_loss_is_the_mean_over_labels_or_over_a_given_count(model):
    ids = tokens(2, 10)
    labels = ids.clone()
    labels[0, :5] = -100
    output = model(ids, labels=labels)
    shared = model(ids, labels=labels, num_items_in_batch=torch.tensor(100))
    log_p = output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    kept = log_p[labels[:, 1:] != -100]
    torch.testing.assert_close(output.loss, -kept.mean())
    torch.testing.assert_close(shared.loss, -kept.sum() / 100)


@torch.no_grad()
def test_evidence_comes_layer_by_layer_when_asked_for(model):
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    assert model(ids).gates is None
    by_layer = model(ids, attention_mask=mask, output_gates=True).gates
    assert len(by_layer) == model.config.num_hidden_layers
    for layer, gates in enumerate(by_layer):
        if model.config.model_type == "prismlm_deltanet":
            assert gates.shape == (2, 9, model.config.num_heads)
            continue
        for gate in gates:
            parts = gate.unflatten(-1, (model.config.num_groups, -1)).sum(-1)
            torch.testing.assert_close(parts, mask.float()[..., None].expand_as(parts))
        shared = layer in model.config.shared_gate_layers
        assert torch.equal(gates.write, gates.read) == shared


def test_a_setting_by_its_former_name():
    settings = {"num_channels": 4, "hidden_size": 24, "shared_routing_layers": [0]}
    with pytest.raises(StrictDataclassError, match="shared_routing_layers has 'gate' for"):
        ProtoTConfig(**settings)
