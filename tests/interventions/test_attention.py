"""Clamping attention weights of one text onto another."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.interventions.attention import clamp_attention, mapped_weights, record_attention
from prismlm.models.attention import reading_attention
from prismlm.models.checkpoint import read_checkpoint
from tests.helpers.families import FAMILIES
from tests.helpers.mixer_models import make_llama, make_model, tokens

A, B = tokens(9), tokens(9, seed=1)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


def family(name):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[name]()).eval()


def test_two_tokens_by_hand():
    own = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    recorded = torch.tensor([[1.0, 0.0], [0.2, 0.8]])
    assert torch.equal(mapped_weights(own, recorded, torch.tensor([0, 1])), recorded)
    # The second keeps its own row; the first has no other choice.
    assert torch.equal(mapped_weights(own, recorded, torch.tensor([0, -1])), own)


def test_an_inserted_token_is_looked_at_as_before_and_the_rest_as_recorded():
    own = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.2, 0.3, 0.5]])
    recorded = torch.tensor([[1.0, 0.0], [0.25, 0.75]])
    found = mapped_weights(own, recorded, torch.tensor([0, -1, 1]))
    expected = [[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.7 * 0.25, 0.3, 0.7 * 0.75]]
    assert torch.allclose(found, torch.tensor(expected))


def test_of_a_removed_token_the_rest_shares_what_it_had():
    own = torch.tensor([[1.0, 0.0], [0.6, 0.4]])
    recorded = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.5, 0.4]])
    found = mapped_weights(own, recorded, torch.tensor([0, 2]))
    assert torch.allclose(found[1], torch.tensor([0.2, 0.8]))
    nothing = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    assert torch.equal(mapped_weights(own, nothing, torch.tensor([0, 2])), own)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "mistral", "gemma2", "cohere", "phi"])
def test_a_text_clamped_onto_itself_changes_nothing_and_another_does(name):
    model = family(name)
    before = logits(model, A)
    with clamp_attention(model, record_attention(model, A)):
        assert torch.allclose(logits(model, A), before, atol=1e-5)
    with clamp_attention(model, record_attention(model, B)):
        assert (logits(model, A) - before).abs().max() > 1e-3
    assert torch.equal(logits(model, A), before)
    assert model.config._attn_implementation != "prismlm_clamped"


def test_the_weights_of_a_clamped_pass_are_those_that_were_recorded():
    model, found = make_llama(), {}
    record = record_attention(model, B)
    with (
        clamp_attention(model, record),
        reading_attention(model, lambda layer, weights: found.update({layer: weights[0].clone()})),
    ):
        logits(model, A)
    for layer, weights in enumerate(record.layers):
        assert torch.allclose(found[layer], weights, atol=1e-6)
        assert weights.shape == (4, 9, 9)


def test_what_does_not_fit_is_refused(studied):
    model = make_llama()
    record = record_attention(model, A)
    with clamp_attention(model, record), pytest.raises(InputError, match="the clamp has 9"):
        logits(model, tokens(10))
    for wrong in ([0, 2, 1], [0, 0], [0, 9]):
        with pytest.raises(InputError, match="ascending"), clamp_attention(model, record, wrong):
            pass
    for ids, other in (
        (A[None], model),
        (A, make_model()),
        (A, read_checkpoint(studied / "mamba")[0]),
    ):
        with pytest.raises(InputError, match=r"one sequence|no attention heads"):
            record_attention(other, ids)
