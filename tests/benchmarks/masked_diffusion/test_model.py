"""A decoder that reads both sides, and the split of what it predicts in the place of a mask."""

import math

import pytest
import torch

from benchmarks.masked_diffusion.model import (
    build_masked_diffusion,
    diffusion_loss,
    fill_in,
    masked_states,
)
from prismlm.explain.prediction import split_predictions
from prismlm.layers import PrototypeHead
from prismlm.models.seam import LogitMap

TOKENS, WIDTH = 40, 24


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    small = {"hidden_size": WIDTH, "initializer_range": 0.2}
    return build_masked_diffusion("llama-tiny", TOKENS, 0, **small).eval()


@pytest.fixture
def ids():
    return torch.randint(1, TOKENS, (1, 12), generator=torch.Generator().manual_seed(1))


def state_at(model, ids, place, attended=None):
    masked = torch.zeros_like(ids).bool()
    masked[0, place] = True
    with torch.no_grad():
        return masked_states(model, ids, masked, attended)[0]


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


def test_parts_sum_to_the_logit_of_the_masked_token_itself(model, ids):
    head = PrototypeHead(WIDTH, 16, 4)
    head.reset_parameters(torch.Generator().manual_seed(2))
    places = [0, 5, 11]
    read = ids.clone()
    read[0, places] = model.mask_id
    with torch.no_grad():
        logits = model(input_ids=read).logits[0]
    split = split_predictions(model, head, LogitMap.of(model), read, 12, targets=ids[0])
    for place in places:
        token = int(ids[0, place])
        own = logits[place, token].item()
        assert split.parts.logit[place].item() == pytest.approx(own, abs=1e-5)
        assert split.parts.contributions[place].abs().sum() > 1e-3
        likely = logits[place].softmax(-1)[token].item()
        assert split.probabilities[place].item() == pytest.approx(likely, rel=1e-5)


def test_the_loss_of_a_model_that_knows_nothing_is_the_entropy_of_all_tokens(ids):
    blank = build_masked_diffusion("llama-tiny", TOKENS, 0, hidden_size=WIDTH)
    blank.lm_head.weight.data.zero_()
    generator = torch.Generator().manual_seed(0)
    rows = ids.expand(64, -1)
    # A token that does not count must not, however often it is read.
    counted = torch.arange(12).expand(64, -1) > 0
    seen = torch.ones_like(counted)
    with torch.no_grad():
        losses = [diffusion_loss(blank, rows, counted, seen, generator).item() for _ in range(20)]
    assert sum(losses) / 20 == pytest.approx(math.log(TOKENS + 1), rel=0.1)


def test_filling_in_leaves_what_was_read_and_writes_no_mask(model, ids):
    read = ids[0].clone()
    read[3:9] = model.mask_id
    written = fill_in(model, read, 4)
    assert torch.equal(written[:3], read[:3])
    assert torch.equal(written[9:], read[9:])
    assert (written < model.mask_id).all()
    with torch.no_grad():
        likely = model(input_ids=read[None]).logits[0, 3:9, : model.mask_id].softmax(-1)
    at_once = fill_in(model, read, 1)[3:9]
    assert torch.equal(at_once, likely.argmax(-1))
    # The surest is written first, so later steps cannot change it.
    surest = likely.max(-1).values.argmax()
    assert written[3:9][surest] == at_once[surest]
