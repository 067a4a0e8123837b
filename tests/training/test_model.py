"""The model that is trained: its losses, by hand, and the initialisation of its prototypes."""

import math
from itertools import chain, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prismlm.models.seam import LogitMap, capture
from prismlm.training import LossWeights
from prismlm.training.model import (
    OutputMap,
    VocabularySample,
    divergence,
    initialise_prototypes,
    prototype_only_losses,
    sample_positions,
    sample_states,
    spherical_kmeans,
)
from tests.helpers.tiny_head import WEIGHTS, batch, make, uneven_rows


def test_the_model_stays_and_its_loss_is_the_weighted_sum_of_the_parts():
    weights = LossWeights(
        prototype_pull=0.3, point_pull=0.5, residual=0.7, diversity=0.9, prototype_only_kl=0.0
    )
    model, inputs = make(weights=weights), batch()
    model.loss_scale = 0.25
    output = model(**inputs)
    plain = model.model(input_ids=inputs["input_ids"], labels=inputs["labels"])
    torch.testing.assert_close(output.logits, plain.logits, rtol=0, atol=1e-6)
    assert output.routing.indices.shape == (20, 3)
    parts, names = output.losses, ("prototype_pull", "point_pull", "residual", "diversity")
    assert tuple(parts) == ("ce", *names)
    torch.testing.assert_close(parts["ce"], plain.loss.detach())
    expected = parts["ce"] + 0.25 * sum(getattr(weights, name) * parts[name] for name in names)
    torch.testing.assert_close(output.loss.detach(), expected)


def test_the_head_is_left_out_until_it_is_initialised():
    output = make(initialised=False)(**batch())
    assert output.routing is None
    assert list(output.losses) == ["ce"]
    assert output.loss.item() == output.losses["ce"].item()


@pytest.mark.parametrize("detach", [True, False])
def test_only_a_head_that_is_not_detached_reaches_the_model(detach):
    weights = LossWeights(prototype_only_ce=1.0, prototype_only_kl=1.0)
    model = make(detach=detach, weights=weights)
    assert not model(**batch()).losses["ce"].requires_grad
    model(**batch()).loss.backward()
    plain = make()
    plain.model(input_ids=batch()["input_ids"], labels=batch()["labels"]).loss.backward()
    pairs = zip(model.model.parameters(), plain.model.parameters(), strict=True)
    same = all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert same == detach
    assert model.prototype_head.prototypes.grad.abs().sum() > 0


def test_padding_moves_no_prototype_and_no_loss():
    model, inputs = make(detach=True), batch()
    inputs["token_mask"][:, 6:] = False
    inputs["labels"] = inputs["labels"].masked_fill(~inputs["token_mask"], -100)
    first = model(**inputs).losses
    inputs["input_ids"] = inputs["input_ids"].clone()
    inputs["input_ids"][:, 6:] = 7
    second = model(**inputs).losses
    torch.testing.assert_close(first, second)


NONE = {"prototype_pull": 0.0, "point_pull": 0.0, "residual": 0.0}
BOTH = LossWeights(**NONE, prototype_only_ce=1.0)


@pytest.mark.parametrize(("length", "share", "stride"), [(10, 1.0, 1), (12, 0.25, 4)])
def test_the_sampled_positions_shift_until_all_were_taken(length, share, stride):
    cpu = torch.device("cpu")
    steps = [sample_positions(length, share, step, cpu).tolist() for step in range(stride)]
    assert sorted(chain.from_iterable(steps)) == list(range(length))
    assert sample_positions(length, share, stride, cpu).tolist() == steps[0]
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
    expected = F.cross_entropy(logits[1:], labels[1:])
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


def rows(count, length=10, valid=10):
    inputs = batch(count, length, seed=count)
    inputs["token_mask"][:, valid:] = False
    return [{name: value[i] for name, value in inputs.items()} for i in range(count)]


def all_states(model, items):
    model.eval()
    with torch.no_grad(), capture(model.model) as seen:
        model.model(input_ids=torch.stack([item["input_ids"] for item in items]), use_cache=False)
    return seen.z[torch.stack([item["token_mask"] for item in items])]


def test_every_prototype_has_the_direction_of_a_different_state():
    model, items = make(initialised=False), rows(5, valid=7)
    initialise_prototypes(model, items, torch.Generator().manual_seed(0))
    states = all_states(model, items)
    prototypes = model.prototype_head.prototypes.detach()
    cosines = F.cosine_similarity(prototypes[:, None], states[None], dim=-1)
    best, nearest = cosines.max(1)
    torch.testing.assert_close(best, torch.ones(12))
    assert len(nearest.unique()) == 12
    torch.testing.assert_close(prototypes.norm(dim=1) * 3, states[nearest].norm(dim=1))
    assert model.initialised


def test_all_positions_can_be_sampled_and_no_more():
    model, items = make(), rows(4, length=40, valid=30)
    generator = torch.Generator().manual_seed(0)
    drawn = sample_states(model.model, items, 120, generator)
    distances = torch.cdist(all_states(model, items), drawn)
    assert sorted(distances.argmin(1).tolist()) == list(range(120))
    assert len(sample_states(model.model, items, 121, generator)) == 120


def plain_kmeans(vectors, centres, iterations):
    """The same, one vector after the other."""
    unit, centres = F.normalize(vectors, dim=-1), F.normalize(centres, dim=-1)
    for _ in range(iterations):
        nearest = []
        for vector in unit:
            cosines = [float(vector @ centre) for centre in centres]
            nearest.append((max(cosines), cosines.index(max(cosines))))
        worst = sorted(range(len(unit)), key=lambda n: nearest[n][0])
        moved = []
        for i in range(len(centres)):
            members = [unit[n] for n, (_, owner) in enumerate(nearest) if owner == i]
            total = torch.stack(members).sum(0) if members else unit[worst.pop(0)]
            moved.append(F.normalize(total, dim=-1))
        centres = torch.stack(moved)
    return centres


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 5), st.integers(0, 4), st.data())
def test_k_means_is_the_plain_loop(count, more, width, iterations, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))
    vectors = torch.randn(count + more, width + 1, generator=generator)
    start = vectors[torch.randperm(len(vectors), generator=generator)[:count]]
    quick = spherical_kmeans(vectors, start, iterations)
    torch.testing.assert_close(quick, plain_kmeans(vectors, start, iterations))
