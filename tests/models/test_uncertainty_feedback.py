"""Codes of uncertainty from the first token on, by passes and in pieces, and what learns."""

import pytest
import torch

from prismlm.ops.uncertainty_feedback import naive, quantise
from tests.helpers.feedback_families import FAMILIES, V, attach_drawn, build


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def cache_name(model):
    return "cache_params" if model.config.model_type == "mamba" else "past_key_values"


def recursion(model, feedback, ids):
    """The meaning: one token at a time, its code from the prediction before it."""
    name, cache, code, codes, logits = cache_name(model), None, -1, [], []
    for at in range(ids.shape[1]):
        codes.append(torch.full((len(ids), 1), -1) if at == 0 else code)
        given = {name: cache, "use_cache": True, "uncertainty_codes": codes[-1]}
        output = model(ids[:, at : at + 1], **given)
        cache = output[name]
        logits.append(output.logits)
        share = naive.normalised_entropy(output.logits[:, -1]).float()
        code = quantise(share, feedback.embedding.levels)[:, None]
    return torch.cat(logits, 1), torch.cat(codes, 1)


@torch.no_grad()
def test_step_by_step_is_the_recursion_and_replayed_codes_give_it_at_once(model):
    plain = model(torch.tensor([[3, 4, 5]])).logits
    feedback = attach_drawn(model, 64)
    ids = torch.randint(2, V, (2, 7))
    expected, codes = recursion(model, feedback, ids)
    name, cache, found = cache_name(model), None, []
    for at in range(7):
        output = model(ids[:, at : at + 1], **{name: cache, "use_cache": True})
        cache = output[name]
        assert torch.equal(output.uncertainty_codes[:, 0], codes[:, at])
        found.append(output.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    at_once = model(ids, uncertainty_codes=codes, use_cache=False)
    torch.testing.assert_close(at_once.logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(at_once.uncertainty_codes, codes)
    # It says something: other codes, other logits.
    other = model(ids, uncertainty_codes=(codes + 7).clamp_max(63), use_cache=False).logits
    assert (other - expected).abs().max() > 1e-3
    feedback.detach()
    assert torch.equal(model(torch.tensor([[3, 4, 5]])).logits, plain)


@torch.no_grad()
def test_more_passes_make_more_positions_exact(model):
    feedback = attach_drawn(model, 64)
    ids = torch.randint(2, V, (1, 6))
    expected, codes = recursion(model, feedback, ids)
    for passes in (1, 2, 6):
        feedback.passes = passes
        output = model(ids, use_cache=False)
        # Position 0 has no code; each further pass makes one more right.
        assert torch.equal(output.uncertainty_codes[:, :passes], codes[:, :passes])
    torch.testing.assert_close(output.logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_next_tokens_of_a_prompt_in_pieces_begin_with_its_code(model):
    feedback = attach_drawn(model, 64)
    name, ids = cache_name(model), torch.randint(2, V, (1, 6))
    first = model(ids[:, :4], use_cache=True)
    code = quantise(naive.normalised_entropy(first.logits[:, -1]).float(), 64)
    second = model(ids[:, 4:], **{name: first[name], "use_cache": True})
    assert second.uncertainty_codes.tolist() == [[code.item(), 32]]
    replayed = torch.cat([first.uncertainty_codes, second.uncertainty_codes], 1)
    whole = model(ids, uncertainty_codes=replayed, use_cache=False)
    if name == "past_key_values":
        # Hugging Face's Mamba goes on from a cache by single tokens only, with or without codes.
        torch.testing.assert_close(whole.logits[:, 4:], second.logits, atol=1e-4, rtol=1e-4)
    # A second pass over a piece leaves the cache as it was.
    feedback.passes = 2
    first = model(ids[:, :4], use_cache=True, uncertainty_codes=first.uncertainty_codes)
    before = first[name].get_seq_length() if name == "past_key_values" else None
    again = model(ids[:, 4:], **{name: first[name], "use_cache": True})
    if before is not None:
        assert first[name].get_seq_length() == before + 2
    predicted = quantise(naive.normalised_entropy(second.logits[:, 0]).float(), 64)
    assert again.uncertainty_codes.tolist() == [[code.item(), predicted.item()]]


def test_gradients_reach_the_table_and_the_model_and_not_the_codes(model):
    feedback = attach_drawn(model, 64, passes=2)
    model.train()
    ids = torch.randint(2, V, (2, 6))
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    used = output.uncertainty_codes[:, 1:].unique()
    touched = feedback.embedding.weight.grad.abs().sum(1).nonzero()[:, 0]
    # The last position's vector has a part in no loss.
    inner = output.uncertainty_codes[:, 1:-1].unique()
    assert set(inner.tolist()) <= set(touched.tolist()) <= set(used.tolist())
