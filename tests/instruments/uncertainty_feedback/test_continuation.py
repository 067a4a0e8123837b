"""What a model writes after a prompt, its codes fed back or not."""

import numpy as np
import pytest
import torch

from prismlm.instruments.uncertainty_feedback import Signal
from prismlm.instruments.uncertainty_feedback.continuation import continuations, draw_tokens
from prismlm.instruments.uncertainty_feedback.signal import no_codes, own_codes
from tests.helpers.feedback_models import make_fed_gpt2, make_fed_protot, random_texts


def test_choosing_at_a_quantile():
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log().expand(4, -1)
    draws = torch.tensor([0.1, 0.21, 0.69, 0.99])
    assert draw_tokens(logits, draws, 1.0).tolist() == [0, 1, 1, 2]
    assert draw_tokens(logits, draws, 0).tolist() == [1, 1, 1, 1]
    # Colder is nearer to the likeliest: 4, 25 and 9 in 38.
    assert draw_tokens(logits, torch.tensor([0.1, 0.12, 0.76, 0.77]), 0.5).tolist() == [0, 1, 1, 2]


@torch.no_grad()
@pytest.mark.parametrize("make", [make_fed_gpt2, make_fed_protot])
def test_what_is_written_is_what_the_model_generates(make):
    model, feedback = make()
    prompts = random_texts(5, 8, 5)
    codes = own_codes(model, prompts, Signal("passes", 2))
    found = continuations(model, prompts, codes, 6, temperature=0)
    feedback.passes = 2
    for prompt, one in zip(prompts, found, strict=True):
        whole = model.generate(
            prompt[None], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert torch.equal(whole[0, len(prompt) :], one.ids)
    nothing = tuple(torch.full((5,), -1) for _ in prompts)
    bare = continuations(model, prompts, no_codes(prompts), 6, written_codes=nothing, temperature=0)
    whole = torch.cat([prompts[1], bare[1].ids])
    none = torch.full((1, len(whole)), -1)
    logits = model(whole[None], uncertainty_codes=none, use_cache=False).logits[0, 7:-1]
    assert torch.equal(logits.argmax(-1), bare[1].ids)
    share = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1) / np.log(37)
    torch.testing.assert_close(bare[1].shares, share, atol=1e-4, rtol=1e-4)
