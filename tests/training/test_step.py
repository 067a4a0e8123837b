"""A step's losses and gradient, however its rows are split into micro-batches."""

import pytest
import torch
import torch.nn.functional as F

from prismlm.training import LossWeights
from prismlm.training.step import OptimizerStep, paired_cosines
from tests.helpers.micro_batches import WEIGHTS, assert_same, split, uneven_rows
from tests.helpers.tiny_head import make
from tests.helpers.two_processes import gradients_of


def in_micro_batches(sizes, **arguments):
    return gradients_of(make(weights=WEIGHTS, **arguments), split(uneven_rows(), *sizes))


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2), (1, 5, 2)])
def test_a_detached_step_does_not_depend_on_its_micro_batches(sizes):
    whole, losses = in_micro_batches([8], detach=True)
    parts, sums = in_micro_batches(sizes, detach=True)
    assert_same(whole, parts)
    assert_same(losses, sums)


def test_means_of_means_would_be_another_loss():
    whole = make(weights=WEIGHTS)(**uneven_rows()).losses
    each = [make(weights=WEIGHTS)(**part).losses for part in split(uneven_rows(), 4, 4)]
    for name in ("ce", "prototype_pull", "point_pull", "residual", "prototype_only_ce"):
        mean = (each[0][name] + each[1][name]) / 2
        assert (mean - whole[name]).abs() > 3e-5, name


def test_with_gradient_into_the_model_the_head_still_gets_the_steps_gradient():
    whole, losses = in_micro_batches([8])
    parts, sums = in_micro_batches([4, 4])
    assert_same(losses, sums)
    assert_same(whole, parts, only="prototype_head")


def test_the_models_side_of_r1_is_the_mean_over_micro_batches():
    pull = LossWeights(prototype_pull=1.0, point_pull=0.0, residual=0.0, prototype_only_kl=0.0)
    rows = split(uneven_rows(), 4, 4)
    ours, _ = gradients_of(make(weights=pull), rows)
    reference = make(weights=pull)
    labels = sum(int((part["labels"][:, 1:] != -100).sum()) for part in rows)
    head = reference.prototype_head.prototypes.detach()
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
        nearest = F.cosine_similarity(z[:, None], head[None], dim=-1).amax(0)
        (ce / labels - nearest.mean() / 2).backward()
    expected = {n: p.grad for n, p in reference.model.named_parameters()}
    assert_same(
        expected, {n.removeprefix("model."): g for n, g in ours.items() if "head." not in n}
    )


@pytest.mark.parametrize("share", [0.5, 0.34])
def test_positions_left_out_are_not_counted(share):
    gradients = []
    for sizes in ([8], [1, 5, 2]):
        model = make(weights=WEIGHTS, detach=True)
        model.position_share = share
        model.step = 2
        rows = split(uneven_rows(), *sizes)
        positions = model.head_positions(10, 2, torch.device("cpu"))
        gradients.append(gradients_of(model, rows, positions=positions))
    assert_same(gradients[0][0], gradients[1][0])
    assert_same(gradients[0][1], gradients[1][1])


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
        model = make(weights=WEIGHTS, detach=True)
        model.model.accepts_loss_kwargs = accepts
        results.append(gradients_of(model, split(uneven_rows(), *sizes)))
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


def test_a_zero_row_has_cosine_nought():
    z = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    p = torch.tensor([[4.0, 3.0], [1.0, 0.0], [-2.0, 0.0]])
    torch.testing.assert_close(paired_cosines(z, p), torch.tensor([0.96, 0.0, -1.0]))
