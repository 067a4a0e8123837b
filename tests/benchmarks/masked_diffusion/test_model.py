"""A decoder that reads both sides, made of one that reads left to right."""

import math

import pytest
import torch

from benchmarks.masked_diffusion.model import (
    after_an_end,
    diffusion_loss,
    fill_in,
    from_left_to_right,
    masked_states,
)
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import capture

TOKENS, WIDTH = 40, 24


@pytest.fixture(scope="module")
def left_to_right():
    torch.manual_seed(0)
    small = {"preset": "llama-tiny", "hidden_size": WIDTH, "initializer_range": 0.2}
    return build_model(build_config(small, TOKENS, 0)).eval()


@pytest.fixture
def model(left_to_right):
    return from_left_to_right(left_to_right).eval()


@pytest.fixture
def ids():
    return torch.randint(1, TOKENS, (1, 12), generator=torch.Generator().manual_seed(1))


def state_at(model, ids, place, attended=None):
    masked = torch.zeros_like(ids).bool()
    masked[0, place] = True
    with torch.no_grad():
        return masked_states(model, ids, masked, attended)[0]


def test_with_the_causal_mask_closed_it_is_the_model_that_it_was_made_of(left_to_right, model, ids):
    model.open_share = 0.0
    with torch.no_grad():
        closed, before = model(input_ids=ids).logits, left_to_right(input_ids=ids).logits
        assert torch.equal(closed[..., :TOKENS], before)
        model.open_share = 0.5
        half = model(input_ids=ids).logits
        model.open_share = 1.0
        assert (half - closed).abs().max() > 1e-2
        assert (half - model(input_ids=ids).logits).abs().max() > 1e-2


def test_a_masked_token_is_predicted_by_the_state_before_it(left_to_right, model, ids):
    # With the causal mask closed, that state does not see the mask either.
    model.open_share = 0.0
    with torch.no_grad(), capture(left_to_right) as seen:
        left_to_right(input_ids=after_an_end(left_to_right, ids))
    for place in (0, 5, 11):
        assert torch.allclose(state_at(model, ids, place), seen.z[0, place], atol=1e-6)


@pytest.mark.parametrize("changed", [2, 9], ids=["left", "right"])
def test_the_state_at_a_mask_hangs_on_the_text_of_either_side(model, ids, changed):
    other = ids.clone()
    other[0, changed] = ids[0, changed] % (TOKENS - 1) + 1
    assert (state_at(model, ids, 6) - state_at(model, other, 6)).abs().max() > 1e-2


def test_the_state_at_a_mask_knows_neither_its_token_nor_padding(model, ids):
    other = ids.clone()
    other[0, 6], other[0, 10:] = ids[0, 6] % (TOKENS - 1) + 1, 3
    read = torch.arange(12)[None] < 10
    assert torch.equal(state_at(model, ids, 6, read), state_at(model, other, 6, read))


def test_the_loss_of_a_model_that_knows_nothing_is_the_entropy_of_all_tokens(model, ids):
    model.lm_head.weight.data.zero_()
    generator = torch.Generator().manual_seed(0)
    rows = ids.expand(64, -1)
    # A token that does not count must not, however often it is read.
    counted = torch.arange(12).expand(64, -1) > 0
    seen = torch.ones_like(counted)
    with torch.no_grad():
        losses = [diffusion_loss(model, rows, counted, seen, generator).item() for _ in range(20)]
    assert sum(losses) / 20 == pytest.approx(math.log(TOKENS + 1), rel=0.1)


def test_filling_in_leaves_what_was_read_and_writes_no_mask(model, ids):
    read = ids[0].clone()
    read[3:9] = model.mask_id
    written = fill_in(model, read, 4)
    assert torch.equal(written[:3], read[:3])
    assert torch.equal(written[9:], read[9:])
    assert (written < model.mask_id).all()
    with torch.no_grad():
        logits = model(input_ids=after_an_end(model, read[None])).logits
    likely = logits[0, 3:9, : model.mask_id].softmax(-1)
    at_once = fill_in(model, read, 1)[3:9]
    assert torch.equal(at_once, likely.argmax(-1))
    # The surest is written first, so later steps cannot change it.
    surest = likely.max(-1).values.argmax()
    assert written[3:9][surest] == at_once[surest]
