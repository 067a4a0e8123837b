"""Clamping attention weights of one text onto another."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.interventions.attention import clamp_attention, mapped_weights, record_attention
from prismlm.models.attention import reading_attention
from tests.helpers.families import build
from tests.helpers.mixer_models import make_llama, make_model, tokens

A, B = tokens(9), tokens(9, seed=1)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize(
    ("own", "recorded", "sources", "expected"),
    [
        ([[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.2, 0.8]], [0, 1], [[1.0, 0.0], [0.2, 0.8]]),
        # The second keeps its own row; the first has no other choice.
        ([[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.2, 0.8]], [0, -1], [[1.0, 0.0], [0.5, 0.5]]),
        # An inserted token keeps its weight, and the rest is spread as recorded.
        ([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.2, 0.3, 0.5]], [[1.0, 0.0], [0.25, 0.75]],
         [0, -1, 1], [[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.7 * 0.25, 0.3, 0.7 * 0.75]]),
        # The others share what a removed token had; without any of the weight, w stays.
        ([[1.0, 0.0], [0.6, 0.4]], [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.1, 0.5, 0.4]],
         [0, 2], [[1.0, 0.0], [0.2, 0.8]]),
        ([[1.0, 0.0], [0.6, 0.4]], [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]],
         [0, 2], [[1.0, 0.0], [0.6, 0.4]]),
    ],
    ids=["equal", "own", "inserted", "removed", "nothing"],
)  # fmt: skip
def test_mapped_weights_by_hand(own, recorded, sources, expected):
    weights = mapped_weights(torch.tensor(own), torch.tensor(recorded), torch.tensor(sources))
    assert torch.allclose(weights, torch.tensor(expected))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_text_clamped_onto_itself_changes_nothing_and_another_does(name):
    model = build(name)
    before = logits(model, A)
    with clamp_attention(model, record_attention(model, A)):
        assert torch.allclose(logits(model, A), before, atol=1e-5)
    with clamp_attention(model, record_attention(model, B)):
        assert (logits(model, A) - before).abs().max() > 1e-3
    assert torch.equal(logits(model, A), before)
    assert model.config._attn_implementation != "prismlm_clamped"


def test_a_clamped_pass_has_the_recorded_weights_and_other_texts_are_refused():
    model, read = make_llama(), {}
    record = record_attention(model, B)
    with (
        clamp_attention(model, record),
        reading_attention(model, lambda layer, weights: read.update({layer: weights[0].clone()})),
    ):
        logits(model, A)
    for layer, weights in enumerate(record):
        assert torch.allclose(read[layer], weights, atol=1e-6)
        assert weights.shape == (4, 9, 9)
    with clamp_attention(model, record), pytest.raises(InputError, match="the clamp has 9"):
        logits(model, tokens(10))
    with pytest.raises(InputError, match="ascending"), clamp_attention(model, record, [0, 2, 1]):
        pass
    with pytest.raises(InputError, match="no attention heads"):
        record_attention(make_model(), A)
