"""The losses of the prediction from prototypes alone, by hand."""

import math
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prismlm.models.seam import LogitMap
from prismlm.training import LossWeights
from prismlm.training.model import (
    OutputMap,
    VocabularySample,
    divergence,
    prototype_only_losses,
    sample_positions,
)
from tests.helpers.micro_batches import WEIGHTS, uneven_rows
from tests.helpers.tiny_head import batch, make

CPU = torch.device("cpu")
NONE = {"prototype_pull": 0.0, "point_pull": 0.0, "residual": 0.0}
BOTH = LossWeights(**NONE, prototype_only_ce=1.0)


@pytest.mark.parametrize(("length", "share", "stride"), [(10, 1.0, 1), (12, 0.25, 4), (7, 0.4, 2)])
def test_the_sampled_positions_shift_until_all_were_taken(length, share, stride):
    steps = [sample_positions(length, share, step, CPU).tolist() for step in range(stride)]
    assert sorted(chain.from_iterable(steps)) == list(range(length))
    assert sample_positions(length, share, stride, CPU).tolist() == steps[0]
    assert all(b - a == stride for taken in steps for a, b in pairwise(taken))


def losses(rebuilt, model, labels, output_map, sample=None, weights=BOTH):
    return prototype_only_losses(model, rebuilt, labels, None, output_map, weights, sample)


def test_the_prediction_of_prototypes_alone_by_hand():
    # W is the identity, so ẑ is the logits: probabilities 3/4, 1/4 and 1/2, 1/2.
    rebuilt = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    model = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    identity = OutputMap(torch.eye(2), None, LogitMap())
    labels = torch.tensor([0, 1])
    actual = losses(rebuilt, model, labels, identity)
    ce = -(math.log(0.75) + math.log(0.5)) / 2
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    second = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert actual["prototype_only_ce"].item() == pytest.approx(ce)
    assert actual["prototype_only_kl"].item() == pytest.approx((first + second) / 2, abs=1e-6)
    # A position without a label counts for neither.
    labels = torch.tensor([-100, 1])
    actual = losses(rebuilt, model, labels, identity)
    assert actual["prototype_only_ce"].item() == pytest.approx(-math.log(0.5))
    assert actual["prototype_only_kl"].item() == pytest.approx(second, abs=1e-6)
    # The model's scale and bias come after W, its soft-cap last.
    capped = OutputMap(torch.eye(2), torch.tensor([1.0, 0.0]), LogitMap(2.0, True, 3.0))
    logits = 3 * torch.tanh(2 * (rebuilt + torch.tensor([1.0, 0.0])) / 3)
    actual = losses(rebuilt, model, labels, capped)
    expected = torch.nn.functional.cross_entropy(logits[1:], labels[1:])
    torch.testing.assert_close(actual["prototype_only_ce"], expected)


def test_drawn_tokens_stand_for_the_others_in_the_divergence():
    # Five tokens: 0 is always compared over; two of the other four are drawn and count double.
    identity = OutputMap(torch.eye(5), None, LogitMap())
    sample = VocabularySample(torch.tensor([9, 1, 1, 1, 1]), frequent=1, drawn=2)
    tokens, log_counts = sample.draw(0)
    assert tokens[0] == 0
    assert log_counts.tolist() == pytest.approx([0.0, math.log(2), math.log(2)])
    model = torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0]])
    rebuilt = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
    only_kl = LossWeights(**NONE)
    actual = losses(rebuilt, model, None, identity, (tokens, log_counts), only_kl)
    # p of token 0 is e² / (e² + 4) and q e / (e + 4), whichever were drawn.
    p, q = math.e**2 / (math.e**2 + 4), math.e / (math.e + 4)
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert actual["prototype_only_kl"].item() == pytest.approx(expected, rel=1e-6)
    everything = VocabularySample(torch.ones(5, dtype=torch.int64), frequent=3, drawn=9)
    actual = losses(rebuilt, model, None, identity, everything.draw(0), only_kl)
    torch.testing.assert_close(actual["prototype_only_kl"], divergence(model, rebuilt).mean())


def test_a_step_takes_the_divergence_over_a_sample_that_depends_on_the_step_alone():
    rows, kl = uneven_rows(), []
    for step in (0, 0, 1):
        model = make(weights=WEIGHTS, detach=True).train()
        model.step, model.vocabulary = step, VocabularySample(torch.arange(50), 6, 6)
        kl.append(model(**rows).losses["prototype_only_kl"].item())
    assert kl[0] == kl[1] != kl[2]
    # Figures of an evaluation are over the whole vocabulary.
    model.eval()
    sampled = model(**rows).losses
    model.vocabulary = None
    assert torch.equal(model(**rows).losses["prototype_only_kl"], sampled["prototype_only_kl"])


def test_the_divergence_of_two_outcomes_by_hand():
    target = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    logits = torch.tensor([[math.log(3), 0.0], [5.0, 5.0]], requires_grad=True)
    actual = divergence(target, logits)
    halves = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    quarters = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    torch.testing.assert_close(actual, torch.tensor([halves, quarters]))
    (actual * torch.tensor([1.0, 2.0])).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.25, -0.25], [-0.5, 0.5]]))


def test_a_head_that_rebuilds_every_state_diverges_by_nothing():
    model = make(detach=True, weights=LossWeights(prototype_only_kl=1.0))
    inputs = batch(rows=1, length=6)
    with torch.no_grad():
        z = model.model.model(input_ids=inputs["input_ids"]).last_hidden_state[0]
        model.prototype_head.prototypes[:6] = z
        # One prototype per token, cosine 1 and τ 1: ẑ is z.
        model.prototype_head.prototypes_per_token = 1
        model.prototype_head.log_scale.zero_()
    parts = model(**inputs).losses
    assert parts["prototype_only_kl"].item() == pytest.approx(0, abs=1e-5)
    assert parts["residual"].item() == pytest.approx(0, abs=1e-8)


def plain_divergence(target, logits):
    """KL(p ‖ q) = Σ_v p_v (log p_v − log q_v) per row, p and q the softmaxes of both."""
    p = target.softmax(-1).detach()
    return (p * (p.log() - logits.softmax(-1).log())).sum(-1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 30), st.floats(0.1, 20), st.integers(0, 1000))
def test_the_divergence_and_its_gradient_are_the_naive_ones(rows, vocabulary, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    target = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    logits = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    weights = torch.randn(rows, generator=generator, dtype=torch.float64)
    results = []
    for function in (divergence, plain_divergence):
        leaf = logits.clone().requires_grad_()
        value = function(target, leaf)
        (value * weights).sum().backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-8, atol=1e-9)


def test_the_divergence_of_bf16_logits_is_exact_and_its_gradient_is_in_bf16():
    generator = torch.Generator().manual_seed(0)
    target, logits = (4 * torch.randn(5, 300, generator=generator).bfloat16() for _ in range(2))
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    actual, expected = divergence(target, leaf), plain_divergence(target.double(), exact)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    actual.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(leaf.grad, exact.grad.bfloat16(), rtol=1e-2, atol=1e-6)
