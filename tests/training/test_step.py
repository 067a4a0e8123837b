"""A step's losses and gradient, however its rows are split into micro-batches."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from prismlm.training import LossWeights
from prismlm.training.step import OptimizerStep
from tests.helpers.micro_batches import WEIGHTS, assert_same, split, uneven_rows
from tests.helpers.tiny_head import make
from tests.helpers.two_processes import gradients_of

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
