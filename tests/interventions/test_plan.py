"""Edits hold where they should and nowhere else: caches, beams, batches, threads, tasks, blocks."""

import threading

import pytest
import torch

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


def left_padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def densely(before, routing, z, weight):
    """EDITS on dense activations."""
    after = before.clone()
    after[:, 11] *= 3
    after[:, 12:30] = 0
    return after


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "batch"])
def test_generation_is_that_of_edited_logits(model, head, prompts, cache, beams):
    ids, mask = left_padded(prompts)
    plain = generate(model, ids, mask, beams=beams)
    reference = Reference(model, head, densely, mask)
    expected = generate(model, ids, mask, beams=beams, reference=reference)
    with applied(model, plan(model, head, *EDITS)):
        actual = generate(model, ids, mask, cache=cache, beams=beams)
    assert actual.tolist() == expected.tolist()
    assert (actual != plain).any(), "the edits must matter for the test to mean anything"


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


def test_blocks_that_exclude_one_another(model, head):
    with applied(model, plan(model, head, only="prototypes")):
        with applied(model, plan(model, head, Ablate(24))):
            logits(model)
        with (
            pytest.raises(InputError, match="would leave nothing"),
            applied(model, plan(model, head, only="residual")),
        ):
            pass
        with (
            pytest.raises(InputError, match="two different heads"),
            applied(model, plan(model, make_head(), Ablate(24))),
        ):
            pass
    assert hooks(model) == 0


REQUESTS = [(Scale(25, 4.0),), (Group(1.0, prototypes=frozenset(range(40))),), (), (Ablate(24),)]


def written(model, head, edits):
    ids, mask = left_padded(PROMPTS[:1])
    with applied(model, plan(model, head, *edits)):
        return generate(model, ids, mask, tokens=8).tolist(), logits(model)


def test_threads_with_different_edits_do_not_meet(model, head):
    alone = [written(model, head, edits) for edits in REQUESTS]
    assert len({str(ids) for ids, _ in alone}) > 1
    assert len({str(scores.tolist()) for _, scores in alone}) == len(REQUESTS)
    barrier = threading.Barrier(len(REQUESTS) + 1)
    outcomes = {}

    def request(number):
        ids, mask = left_padded(PROMPTS[:1])
        results = []
        for _ in range(5):
            with applied(model, plan(model, head, *REQUESTS[number])):
                barrier.wait(30)  # all blocks are open at once
                results.append((generate(model, ids, mask, tokens=8).tolist(), logits(model)))
                barrier.wait(30)
        outcomes[number] = results

    threads = [threading.Thread(target=request, args=(n,)) for n in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    plain = logits(model)
    for _ in range(5):
        barrier.wait(30)
        assert torch.equal(logits(model), plain)  # no block here, while others are open
        barrier.wait(30)
    for thread in threads:
        thread.join(30)
    for number, (ids, scores) in enumerate(alone):
        assert len(outcomes[number]) == 5
        for ids_then, scores_then in outcomes[number]:
            assert ids_then == ids
            assert torch.equal(scores_then, scores)
    assert hooks(model) == 0
