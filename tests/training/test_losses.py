"""What training minimises: losses by hand, and a step however it is split into micro-batches."""

import math
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
import torch.nn.functional as F

from prismlm.errors import InputError
from prismlm.models.seam import LogitMap
from prismlm.training.losses import (
    LossWeights,
    OptimizerStep,
    OutputMap,
    States,
    VocabularySample,
    divergence,
    prototype_only_losses,
    sample_positions,
    select,
)
from tests.helpers.micro_batches import WEIGHTS, assert_same, split, uneven_rows
from tests.helpers.tiny_head import batch, make
from tests.helpers.two_processes import gradients_of

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


# R1 alone depends on the split.
WITHOUT_R1 = replace(WEIGHTS, prototype_pull=0.0)


def without_r1(losses):
    return {name: value for name, value in losses.items() if name != "prototype_pull"}


def in_micro_batches(sizes, **arguments):
    return gradients_of(make(**arguments), split(uneven_rows(), *sizes))


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2), (1, 5, 2)])
def test_a_step_does_not_depend_on_its_micro_batches(sizes, detach):
    whole, losses = in_micro_batches([8], detach=detach, weights=WITHOUT_R1)
    parts, sums = in_micro_batches(sizes, detach=detach, weights=WITHOUT_R1)
    assert_same(whole, parts)
    assert_same(without_r1(losses), without_r1(sums))


def test_means_of_means_would_be_another_loss():
    whole = make(weights=WEIGHTS)(**uneven_rows()).losses
    each = [make(weights=WEIGHTS)(**part).losses for part in split(uneven_rows(), 4, 4)]
    for name in ("ce", "prototype_pull", "point_pull", "residual", "prototype_only_ce"):
        mean = (each[0][name] + each[1][name]) / 2
        assert (mean - whole[name]).abs() > 3e-5, name


def test_r1_is_the_mean_over_micro_batches():
    pull = LossWeights(prototype_pull=1.0, point_pull=0.0, residual=0.0, prototype_only_kl=0.0)
    rows = split(uneven_rows(), 4, 4)
    found, losses = gradients_of(make(weights=pull), rows)
    reference = make(weights=pull)
    labels = sum(int((part["labels"][:, 1:] != -100).sum()) for part in rows)
    prototypes, value = reference.prototype_head.prototypes, 0
    for part in rows:
        output = reference.model(
            input_ids=part["input_ids"],
            position_ids=part["position_ids"],
            use_cache=False,
            output_hidden_states=True,
        )
        predicted = output.logits[:, :-1].flatten(0, 1)
        ce = F.cross_entropy(predicted, part["labels"][:, 1:].flatten(), reduction="sum")
        z = output.hidden_states[-1][part["token_mask"]]
        nearest = F.cosine_similarity(z[:, None], prototypes[None], dim=-1).amax(0)
        value = value - nearest.detach().mean() / 2
        (ce / labels - nearest.mean() / 2).backward()
    torch.testing.assert_close(losses["prototype_pull"], value)
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert_same(expected, {n: found[n] for n in expected})


@pytest.mark.parametrize("share", [0.5, 0.34])
def test_positions_left_out_are_not_counted(share):
    gradients = []
    for sizes in ([8], [1, 5, 2]):
        model = make(weights=WITHOUT_R1, detach=True)
        model.position_share = share
        model.step = 2
        rows = split(uneven_rows(), *sizes)
        positions = model.head_positions(10, 2, torch.device("cpu"))
        gradients.append(gradients_of(model, rows, positions=positions))
    assert_same(gradients[0][0], gradients[1][0])
    assert_same(*(without_r1(losses) for _, losses in gradients))


def test_one_pass_gives_the_plain_means():
    rows = uneven_rows()
    plain = make(weights=WEIGHTS)(**rows)
    within = make(weights=WEIGHTS)(**rows, within=OptimizerStep.of([rows]))
    torch.testing.assert_close(plain.loss, within.loss)
    assert_same(plain.losses, within.losses, rtol=1e-6)


@pytest.mark.parametrize("accepts", [True, False])
def test_decoders_that_cannot_divide_by_a_count_are_scaled(accepts):
    results = []
    for sizes in ([8], [5, 3]):
        model = make(weights=WITHOUT_R1, detach=True)
        model.model.accepts_loss_kwargs = accepts
        results.append(gradients_of(model, split(uneven_rows(), *sizes)))
    assert_same(results[0][0], results[1][0])
    assert_same(*(without_r1(losses) for _, losses in results))


def test_drawn_tokens_stand_for_the_others_in_the_divergence():
    # Five tokens: 0 is always compared over; two of the other four are drawn and count double.
    identity = OutputMap(torch.eye(5), None, LogitMap())
    sample = VocabularySample(torch.tensor([9, 1, 1, 1, 1]), frequent=1, drawn=2)
    tokens, log_counts = sample.draw(0)
    assert tokens[0] == 0
    assert log_counts.tolist() == pytest.approx([0.0, math.log(2), math.log(2)])
    model = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0]])
    alone = States(model, None, None, model)
    rebuilt = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    only_kl = LossWeights(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    found = prototype_only_losses(rebuilt, alone, identity, only_kl, (tokens, log_counts))
    # p of token 0 is e² / (e² + 4) and q e / (e + 4), whichever were drawn.
    p, q = math.e**2 / (math.e**2 + 4), math.e / (math.e + 4)
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert found["prototype_only_kl"].item() == pytest.approx(expected, rel=1e-6)
    whole = VocabularySample(torch.ones(5, dtype=torch.int64), frequent=3, drawn=9)
    found = prototype_only_losses(rebuilt, alone, identity, only_kl, whole.draw(0))
    torch.testing.assert_close(found["prototype_only_kl"], divergence(model, rebuilt).mean())


def test_a_step_takes_the_divergence_over_a_sample_that_depends_on_the_step_alone():
    rows, sizes = uneven_rows(), ([8], [1, 5, 2])
    gradients = {}
    for step in (0, 1):
        for split_into in sizes:
            model = make(weights=WITHOUT_R1, detach=True)
            model.step, model.vocabulary = step, VocabularySample(torch.arange(50), 6, 6)
            gradients[step, len(split_into)] = gradients_of(model, split(rows, *split_into))
    assert_same(gradients[0, 1][0], gradients[0, 3][0])
    kl = {key: losses["prototype_only_kl"] for key, (_, losses) in gradients.items()}
    assert kl[0, 1] == pytest.approx(kl[0, 3].item(), rel=1e-5)
    assert kl[0, 1] != kl[1, 1]
    # Figures of an evaluation are over the whole vocabulary.
    model.eval()
    sampled = model(**rows).losses
    model.vocabulary = None
    assert torch.equal(model(**rows).losses["prototype_only_kl"], sampled["prototype_only_kl"])
