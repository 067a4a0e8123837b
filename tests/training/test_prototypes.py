"""Prototypes: initialisation from hidden states, the scale of their losses, k-means."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from prismlm.errors import InputError
from prismlm.models.seam import capture
from prismlm.training.prototypes import (
    HeadSchedule,
    initialise_prototypes,
    sample_states,
    spherical_kmeans,
)
from prismlm.training.recipe import Recipe
from tests.helpers.tiny_head import VOCABULARY, make


def rows(count, length=10, valid=10):
    generator = torch.Generator().manual_seed(count)
    positions = torch.arange(length)
    return [
        {
            "input_ids": torch.randint(1, VOCABULARY, (length,), generator=generator),
            "position_ids": positions,
            "token_mask": positions < valid,
        }
        for _ in range(count)
    ]


def all_states(model, items):
    model.eval()
    with torch.no_grad(), capture(model.model) as seen:
        model.model(input_ids=torch.stack([item["input_ids"] for item in items]), use_cache=False)
    return seen.z[torch.stack([item["token_mask"] for item in items])]


def test_every_prototype_has_the_direction_of_a_different_state():
    model, items = make(initialised=False), rows(5, valid=7)
    initialise_prototypes(model, items, torch.Generator().manual_seed(0))
    states = all_states(model, items)
    cosines = torch.nn.functional.cosine_similarity(
        model.prototype_head.prototypes.detach()[:, None], states[None], dim=-1
    )
    best, nearest = cosines.max(1)
    torch.testing.assert_close(best, torch.ones(12))
    assert len(nearest.unique()) == 12
    lengths = model.prototype_head.prototypes.detach().norm(dim=1) * 3
    torch.testing.assert_close(lengths, states[nearest].norm(dim=1))
    assert model.initialised


def test_all_positions_can_be_sampled_and_no_more():
    model, items = make(), rows(4, length=40, valid=30)
    generator = torch.Generator().manual_seed(0)
    drawn = sample_states(model.model, items, 120, generator)
    distances = torch.cdist(all_states(model, items), drawn)
    assert sorted(distances.argmin(1).tolist()) == list(range(120))
    with pytest.raises(InputError, match="have 120 positions, fewer than the 121 prototypes"):
        sample_states(model.model, items, 121, generator)


def test_clusters_cover_the_states_better_than_states_do():
    generator = torch.Generator().manual_seed(0)
    cover = {}
    for method in ("states", "kmeans"):
        model, items = make(initialised=False), rows(60)
        initialise_prototypes(model, items, generator.manual_seed(0), method)
        states = all_states(model, items)
        prototypes = model.prototype_head.prototypes.detach()
        cosines = torch.nn.functional.cosine_similarity(states[:, None], prototypes[None], dim=-1)
        cover[method] = cosines.max(1).values.mean().item()
        # z / (k τ), k = 3 and τ = 1; clusters have the mean norm of the states they are made of.
        assert prototypes.norm(dim=1).mean().item() == pytest.approx(
            states.norm(dim=1).mean().item() / 3, rel=0.02
        )
    assert cover["kmeans"] > cover["states"] + 0.01


@pytest.mark.parametrize(("warmup", "scales"), [(0.5, [0.0, 0.0, 0.5, 1.0]), (0.0, [1.0] * 4)])
def test_the_losses_rise_from_the_initialisation(warmup, scales):
    model = make(initialised=True)
    values = {"corpus": "c", "out": "o", "model": {}, "steps": 100}
    head = {"initialise_at_step": 10}
    schedule = HeadSchedule([], Recipe(**values, head=head, losses={"warmup": warmup}))
    actual = []
    for step in (0, 10, 30, 50):
        state = SimpleNamespace(global_step=step, max_steps=100)
        schedule.on_step_begin(None, state, None, model=model)
        actual.append(model.loss_scale)
    assert actual == scales


def test_two_pairs_of_directions_by_hand():
    # Angles 0°, 20°, 90°, 130°, of any length; centres start on the first two vectors.
    angles = torch.tensor([0.0, 20.0, 90.0, 130.0]) * math.pi / 180
    vectors = torch.stack([angles.cos(), angles.sin()], 1) * torch.tensor([[1], [5], [2], [0.1]])
    one = spherical_kmeans(vectors, vectors[:2], 1)
    # At first 20°, 90° and 130° belong to the second centre; its mean direction is near 81°.
    sums = angles[1:].cos().sum(), angles[1:].sin().sum()
    turned = math.atan2(sums[1], sums[0])
    torch.testing.assert_close(one[0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(one[1], torch.tensor([math.cos(turned), math.sin(turned)]))
    # Then 20° goes over to the first.
    expected = torch.tensor([10.0, 110.0]) * math.pi / 180
    actual = spherical_kmeans(vectors, vectors[:2], 3)
    torch.testing.assert_close(actual, torch.stack([expected.cos(), expected.sin()], 1))


def test_an_empty_centre_moves_to_the_worst_placed_vector():
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 1.0]])
    centres = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -5.0]])
    actual = spherical_kmeans(vectors, centres, 1)
    torch.testing.assert_close(actual[2], torch.tensor([-1.0, 1.0]) / math.sqrt(2))


def test_too_few_vectors_are_refused():
    with pytest.raises(InputError, match="3 vectors for 4 centres"):
        spherical_kmeans(torch.ones(3, 2), torch.ones(4, 2), 1)


def plain_kmeans(vectors, centres, iterations):
    """The same, one vector after the other."""
    unit = F.normalize(vectors, dim=-1)
    centres = F.normalize(centres, dim=-1)
    for _ in range(iterations):
        nearest = []
        for vector in unit:
            cosines = [float(vector @ centre) for centre in centres]
            best = max(range(len(cosines)), key=lambda i: (cosines[i], -i))
            nearest.append((cosines[best], best))
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
