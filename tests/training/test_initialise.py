import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.seam import capture
from prismlm.training.initialise import place_prototypes, sample_states
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


def test_every_prototype_points_along_a_state_of_its_own():
    model, items = make(placed=False), rows(5, valid=7)
    place_prototypes(model, items, torch.Generator().manual_seed(0))
    states = all_states(model, items)
    cosines = torch.nn.functional.cosine_similarity(
        model.prototype_head.prototypes.detach()[:, None], states[None], dim=-1
    )
    best, nearest = cosines.max(1)
    torch.testing.assert_close(best, torch.ones(12))
    assert len(nearest.unique()) == 12
    lengths = model.prototype_head.prototypes.detach().norm(dim=1) * 3
    torch.testing.assert_close(lengths, states[nearest].norm(dim=1))
    assert model.placed


def test_dropout_and_the_global_generator_are_left_alone():
    model = make(attention_dropout=0.5).train()
    state = torch.get_rng_state()
    first = sample_states(model.model, rows(3), 20, torch.Generator().manual_seed(3))
    second = sample_states(model.model, rows(3), 20, torch.Generator().manual_seed(3))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.model.training


def test_all_positions_can_be_asked_for_and_no_more():
    model, items = make(), rows(4, length=40, valid=30)
    generator = torch.Generator().manual_seed(0)
    drawn = sample_states(model.model, items, 120, generator)
    distances = torch.cdist(all_states(model, items), drawn)
    assert sorted(distances.argmin(1).tolist()) == list(range(120))
    with pytest.raises(InputError, match="hold 120 positions, and 121 prototypes"):
        sample_states(model.model, items, 121, generator)


def test_clusters_cover_the_states_better_than_states_do():
    generator = torch.Generator().manual_seed(0)
    cover = {}
    for method in ("states", "kmeans"):
        model, items = make(placed=False), rows(60)
        place_prototypes(model, items, generator.manual_seed(0), method)
        states = all_states(model, items)
        prototypes = model.prototype_head.prototypes.detach()
        cosines = torch.nn.functional.cosine_similarity(states[:, None], prototypes[None], dim=-1)
        cover[method] = cosines.max(1).values.mean().item()
        # z / (k τ), k = 3 and τ = 1; clusters have the mean norm of the states they are made of.
        assert prototypes.norm(dim=1).mean().item() == pytest.approx(
            states.norm(dim=1).mean().item() / 3, rel=0.02
        )
    assert cover["kmeans"] > cover["states"] + 0.01


def test_random_prototypes_are_left_as_they_were_drawn():
    model = make(placed=False)
    before = model.prototype_head.prototypes.detach().clone()
    place_prototypes(model, rows(5), torch.Generator().manual_seed(0), "random")
    assert model.placed
    assert torch.equal(model.prototype_head.prototypes, before)
