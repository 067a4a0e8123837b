"""Prototypes placed on hidden states, brought in, and revived."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead
from prismlm.models.seam import capture
from prismlm.training import TrainingInterrupted, build_recipe, train
from prismlm.training.model import Usage
from prismlm.training.prototypes import (
    HeadSchedule,
    place_prototypes,
    revive,
    sample_states,
)
from prismlm.training.recipe import Recipe
from tests.helpers.runs import InterruptAfter, assert_same_run, curve
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


def head_with(prototypes, per_token=1):
    head = PrototypeHead(prototypes.shape[1], len(prototypes), per_token)
    with torch.no_grad():
        head.prototypes.copy_(prototypes)
    return head


def test_uses_are_counted_without_padding_and_without_zero_activations():
    head = head_with(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), per_token=2)
    z = torch.tensor([[2.0, 0.1], [0.1, 3.0], [5.0, 0.0], [0.0, -4.0]])
    usage = Usage(3)
    mask = torch.tensor([True, True, False, True])
    usage.add(head(z), z, mask)
    # The last state has no positive cosine but 0; the third is padding.
    assert usage.counts.tolist() == [2, 2, 0]
    usage.add(head(z), z, mask)
    assert usage.counts.tolist() == [4, 4, 0]
    # A quarter of three states is one: the worst, which no prototype rebuilds.
    torch.testing.assert_close(usage.worst, z[3:])
    usage.reset()
    assert usage.counts.tolist() == [0, 0, 0]
    assert usage.worst is None


def revived(worst, counts=(5, 0, 2, 0)):
    torch.manual_seed(0)
    head = head_with(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])))
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.1)
    head.prototypes.grad = torch.arange(16.0).reshape(4, 4)
    head.log_scale.grad = torch.tensor(0.0)
    optimizer.step()
    before = head.prototypes.detach().clone()
    usage = Usage(4)
    usage.counts, usage.worst = torch.tensor(counts), worst
    count = revive(head, usage, optimizer, torch.Generator().manual_seed(0))
    return head, optimizer.state[head.prototypes], before, count


def test_unused_prototypes_move_onto_badly_explained_states():
    worst = torch.tensor([[0.0, 0.0, 6.0, 8.0], [5.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    head, moments, before, count = revived(worst)
    assert count == 2
    prototypes = head.prototypes.detach()
    for used in (0, 2):
        assert torch.equal(prototypes[used], before[used])
    norms = before[[0, 2]].norm(dim=1)
    chosen = set()
    for unused in (1, 3):
        assert prototypes[unused].norm().item() == pytest.approx(norms.median().item())
        cosines = torch.nn.functional.cosine_similarity(prototypes[unused][None], worst)
        assert cosines.max().item() == pytest.approx(1)
        chosen.add(int(cosines.argmax()))
        assert torch.equal(moments["exp_avg"][unused], torch.zeros(4))
        torch.testing.assert_close(
            moments["exp_avg_sq"][unused], moments["exp_avg_sq"][[0, 2]].mean(0)
        )
    assert len(chosen) == 2
    assert moments["exp_avg"][0].abs().sum() > 0


def test_with_too_few_states_the_rest_waits_and_with_none_in_use_nothing_moves():
    one = torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    head, _, before, count = revived(one)
    assert count == 1
    assert int((head.prototypes.detach() != before).any(1).sum()) == 1
    assert revived(one, counts=(0, 0, 0, 0))[3] == 0
    assert revived(None)[3] == 0
    assert revived(one, counts=(1, 1, 1, 1))[3] == 0


def test_revival_brings_back_what_training_lost_and_survives_a_stop(settings, tmp_path):
    settings["head"] |= {"initialise": "random", "initialise_at_step": 2}
    # More prototypes than so few states can use.
    settings["head"] |= {"prototypes": 300, "prototypes_per_token": 1}
    settings["evaluation"]["every"] = 0
    lost = train(build_recipe(settings | {"out": str(tmp_path / "lost")}))
    settings["head"]["revive_every"] = 5
    straight = train(build_recipe(settings | {"out": str(tmp_path / "straight")}))
    assert straight.quality.in_use > lost.quality.in_use
    recipe = build_recipe(settings)
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(14))
    resumed = train(recipe, resume=True)
    assert curve(resumed.history) == curve(straight.history)
    assert_same_run(recipe.out, straight.directory)


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
