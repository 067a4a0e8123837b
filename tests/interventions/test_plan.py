"""Edits apply with caches, beams and batches, and in their own block and thread only."""

import threading

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from prismlm import Ablate, Group, Scale
from prismlm.errors import InputError
from prismlm.interventions.plan import applied
from tests.helpers.edit_models import PAD, Reference, generate, make_head, make_model, plan

# Prototypes 24 and 25 are active along the first prompt.
PROMPTS = [[5, 9, 2, 40, 33], [17, 8], [1, 60, 7, 12]]
EDITS = Scale(11, 3.0), Group(-1.0, prototypes=frozenset(range(12, 30)))


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def head():
    return make_head()


def densely(before, routing, z, weight):
    """EDITS on dense activations."""
    after = before.clone()
    after[:, 11] *= 3
    after[:, 12:30] = 0
    return after


@pytest.mark.parametrize(
    ("prompts", "cache", "beams"), [(PROMPTS[:1], False, 1), (PROMPTS, True, 1), (PROMPTS, True, 3)]
)
def test_generation_follows_the_edited_logits(model, head, prompts, cache, beams):
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
    mask = (ids != PAD).long()
    plain = generate(model, ids, mask, beams=beams)
    reference = Reference(model, head, densely, mask)
    expected = generate(model, ids, mask, beams=beams, reference=reference)
    with applied(model, plan(model, head, *EDITS)):
        actual = generate(model, ids, mask, cache=cache, beams=beams)
    assert actual.tolist() == expected.tolist()
    assert (actual != plain).any()


def hooks(model):
    return len(model._forward_pre_hooks) + len(model.get_output_embeddings()._forward_pre_hooks)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor(PROMPTS[:1])).logits


def test_blocks_nest_and_leave_nothing_behind(model, head):
    plain = logits(model)
    outer, inner = plan(model, head, Scale(25, 2.0)), plan(model, head, Ablate(24))
    with applied(model, plan(model, head, Scale(25, 2.0), Ablate(24))):
        both = logits(model)
    with applied(model, outer):
        alone = logits(model)
        with applied(model, inner):
            assert torch.equal(logits(model), both)
        assert torch.equal(logits(model), alone)
        with pytest.raises(KeyError), applied(model, inner):
            raise KeyError
        assert torch.equal(logits(model), alone)
        assert hooks(model) == 1
    assert hooks(model) == 0
    assert torch.equal(logits(model), plain)
    assert not torch.equal(alone, plain)
    assert not torch.equal(both, alone)


def test_contradictory_blocks_are_refused(model, head):
    with applied(model, plan(model, head, only="prototypes")):
        with applied(model, plan(model, head, Ablate(24))):
            logits(model)
        for inner, message in (
            (plan(model, head, only="residual"), "would leave nothing"),
            (plan(model, make_head(), Ablate(24)), "two different heads"),
        ):
            with pytest.raises(InputError, match=message), applied(model, inner):
                pass
    assert hooks(model) == 0


def test_another_thread_is_not_edited(model, head):
    plain, found = logits(model), {}

    def elsewhere():
        found["plain"] = logits(model)
        with applied(model, plan(model, head, Ablate(24))):
            found["edited"] = logits(model)

    with applied(model, plan(model, head, Scale(25, 4.0))):
        own = logits(model)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(30)
        assert torch.equal(logits(model), own)
    assert torch.equal(found["plain"], plain)
    with applied(model, plan(model, head, Ablate(24))):
        assert torch.equal(found["edited"], logits(model))
