"""A model's own codes, and losses with codes that are given."""

import pytest
import torch

from prismlm.ops.uncertainty_feedback import naive, quantise
from prismlm.probes.uncertainty_feedback.signal import own_codes, permute_codes, recursion
from tests.helpers.small_models import LEVELS, make_fed_gpt2, make_fed_protot, random_texts

TEXTS = random_texts(9, 5, 9, 7)


@torch.no_grad()
@pytest.mark.parametrize("make", [make_fed_gpt2, make_fed_protot])
def test_the_recursion_is_token_by_token(make):
    model, _ = make()
    codes, result = recursion(model, TEXTS)
    for text, own, one in zip(TEXTS, codes, result, strict=True):
        # The equation: each code from a pass over all that came before it.
        expected = [-1]
        for at in range(1, len(text)):
            prefix = torch.tensor([expected])
            logits = model(text[None, :at], uncertainty_codes=prefix, use_cache=False).logits
            share = naive.normalised_entropy(logits[0, -1]).float()
            expected.append(int(quantise(share, LEVELS)))
        assert (own - torch.tensor(expected)).abs().max() <= 1
        logits = model(text[None], uncertainty_codes=own[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], text[1:], reduction="none")
        torch.testing.assert_close(one.losses.float(), loss, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            one.entropies, naive.normalised_entropy(logits).float(), atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
@pytest.mark.parametrize("passes", [1, 2, 9])
def test_codes_of_passes_are_those_that_the_model_takes(passes):
    model, feedback = make_fed_gpt2()
    result = own_codes(model, TEXTS, passes)
    feedback.passes = passes
    for text, own in zip(TEXTS, result, strict=True):
        assert torch.equal(model(text[None], use_cache=False).uncertainty_codes[0], own)
    if passes == 9:
        assert all(map(torch.equal, result, own_codes(model, TEXTS, 0)))
    if passes == 1:
        assert {int(code) for own in result for code in own[1:]} == {LEVELS // 2}


def test_shuffled_codes_are_the_same_codes_at_positions_that_have_one():
    codes = tuple(torch.tensor([-1, *range(10 * n, 10 * n + 4)]) for n in range(5))
    mixed = permute_codes(codes, 3)
    assert all(row[0] == -1 for row in mixed)
    assert torch.equal(torch.cat(mixed).sort().values, torch.cat(codes).sort().values)
    assert not torch.equal(torch.cat(mixed), torch.cat(codes))
    assert torch.equal(torch.cat(permute_codes(codes, 3)), torch.cat(mixed))
