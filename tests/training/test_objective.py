import math
from itertools import chain, pairwise

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.seam import LogitMap
from prismlm.training.callbacks import HeadSchedule
from prismlm.training.objective import (
    LossWeights,
    OutputMap,
    States,
    prototype_only_losses,
    sample_positions,
    select,
)
from prismlm.training.recipe import Recipe
from tests.helpers.tiny_head import batch, make

CPU = torch.device("cpu")
BOTH = LossWeights(0.0, 0.0, 0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize(("length", "share", "stride"), [(10, 1.0, 1), (12, 0.25, 4), (7, 0.4, 2)])
def test_the_sampled_positions_shift_until_all_were_taken(length, share, stride):
    steps = [sample_positions(length, share, step, CPU).tolist() for step in range(stride)]
    assert sorted(chain.from_iterable(steps)) == list(range(length))
    assert sample_positions(length, share, stride, CPU).tolist() == steps[0]
    assert all(b - a == stride for taken in steps for a, b in pairwise(taken))


def test_a_share_smaller_than_one_position_takes_one():
    assert sample_positions(5, 0.01, 7, CPU).tolist() == [2]


def test_states_are_paired_with_the_next_label():
    z = torch.arange(6.0).reshape(2, 3, 1)
    labels = torch.tensor([[10, 11, -100], [20, 21, 22]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    whole = select(z, None, mask, labels, None)
    assert whole.z.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.labels.tolist() == [11, -100, -100, 21, 22, -100]
    some = select(z, 2 * z, mask, labels, torch.tensor([1]))
    assert some.z.flatten().tolist() == [1, 4]
    assert some.labels.tolist() == [-100, 22]
    assert some.mask.tolist() == [True, True]
    assert some.embedded.flatten().tolist() == [2, 8]


def states(labels, embedded):
    return States(torch.zeros(2, 2), torch.tensor([True, True]), labels, embedded)


def test_the_prediction_of_prototypes_alone_by_hand():
    # W is the identity, so ẑ is the logits: probabilities 3/4, 1/4 and 1/2, 1/2.
    rebuilt = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    model = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    identity = OutputMap(torch.eye(2), None, LogitMap())
    labels = torch.tensor([0, 1])
    found = prototype_only_losses(rebuilt, states(labels, model), identity, BOTH)
    ce = -(math.log(0.75) + math.log(0.5)) / 2
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert found["prototype_only_ce"].item() == pytest.approx(ce)
    assert found["prototype_only_kl"].item() == pytest.approx((first + second) / 2, abs=1e-6)
    # A position without a label counts for neither.
    labels = torch.tensor([-100, 1])
    found = prototype_only_losses(rebuilt, states(labels, model), identity, BOTH)
    assert found["prototype_only_ce"].item() == pytest.approx(-math.log(0.5))
    assert found["prototype_only_kl"].item() == pytest.approx(second, abs=1e-6)
    # The model's scale and bias come after W, its soft-cap last.
    capped = OutputMap(torch.eye(2), torch.tensor([1.0, 0.0]), LogitMap(2.0, True, 3.0))
    logits = 3 * torch.tanh(2 * (rebuilt + torch.tensor([1.0, 0.0])) / 3)
    found = prototype_only_losses(rebuilt, states(labels, model), capped, BOTH)
    expected = torch.nn.functional.cross_entropy(logits[1:], labels[1:])
    torch.testing.assert_close(found["prototype_only_ce"], expected)


def test_a_model_in_bf16_rounds_the_prototypes_logits_as_it_rounds_its_own():
    rebuilt = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    bf16 = OutputMap(torch.eye(2, dtype=torch.bfloat16), None, LogitMap())
    logits = bf16(rebuilt)
    assert torch.equal(logits, rebuilt.bfloat16())
    own = states(torch.tensor([0, 1]), rebuilt.bfloat16())
    found = prototype_only_losses(rebuilt, own, bf16, BOTH)
    assert found["prototype_only_kl"].item() == pytest.approx(0, abs=1e-6)
    expected = (math.log(4 / 3) + math.log(2)) / 2
    assert found["prototype_only_ce"].item() == pytest.approx(expected, abs=2e-3)


def test_the_divergence_needs_the_models_own_logits():
    identity = OutputMap(torch.eye(2), None, LogitMap())
    with pytest.raises(InputError, match="prototype_only_kl"):
        prototype_only_losses(torch.zeros(2, 2), states(None, None), identity, BOTH)


def test_a_head_that_rebuilds_every_state_diverges_by_nothing():
    model = make(detach=True, weights=LossWeights(prototype_only_kl=1.0))
    inputs = batch(rows=1, length=6)
    with torch.no_grad():
        z = model.model.model(input_ids=inputs["input_ids"]).last_hidden_state[0]
        model.prototype_head.prototypes[:6] = z
        # One prototype per token, cosine 1 and τ 1: ẑ is z.
        model.prototypes_per_token = 1
        model.prototype_head.log_scale.zero_()
    parts = model(**inputs).losses
    assert parts["prototype_only_kl"].item() == pytest.approx(0, abs=1e-5)
    assert parts["residual"].item() == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("detach", [True, False])
def test_the_prototype_only_losses_reach_the_model_only_if_they_may(detach):
    model = make(detach=detach, weights=BOTH)
    ce = model(**batch()).losses["ce"]
    assert not ce.requires_grad
    model(**batch()).loss.backward()
    plain = make()
    plain.model(input_ids=batch()["input_ids"], labels=batch()["labels"]).loss.backward()
    pairs = zip(model.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs) == detach
    assert model.prototype_head.prototypes.grad.abs().sum() > 0


def test_in_training_the_head_sees_a_share_of_the_positions():
    model = make(weights=BOTH)
    model.position_share = 0.5
    assert model(**batch()).routing.indices.shape == (10, 3)
    model.eval()
    assert model(**batch()).routing.indices.shape == (20, 3)


def test_k_falls_to_its_end_in_equal_steps():
    plain = {"corpus": "c", "out": "o", "model": {}, "steps": 100}
    head = {"initialise_at_step": 10, "prototypes_per_token": 16}
    falling = Recipe(**plain, head=head | {"anneal_from": 64, "anneal_until": 0.5})
    schedule = HeadSchedule([], falling)
    found = [schedule.prototypes_per_token(step, 100) for step in (0, 10, 20, 30, 50, 99)]
    assert found == [64, 64, 52, 40, 16, 16]
    fixed = HeadSchedule([], Recipe(**plain, head=head))
    assert fixed.prototypes_per_token(0, 100) == 16
    assert [fixed.loss_scale(step, 100) for step in (9, 10, 99)] == [1.0, 1.0, 1.0]
