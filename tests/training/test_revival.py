import pytest
import torch

from prismlm.layers import PrototypeHead
from prismlm.training import TrainingInterrupted, build_recipe, train
from prismlm.training.recipe import Recipe
from prismlm.training.revival import ReviveUnused, Usage, revive
from tests.helpers.runs import InterruptAfter, assert_same_run, curve


def head_of(prototypes, per_token=1):
    head = PrototypeHead(prototypes.shape[1], len(prototypes), per_token)
    with torch.no_grad():
        head.prototypes.copy_(prototypes)
    return head


def test_uses_are_counted_without_padding_and_without_zero_activations():
    head = head_of(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), per_token=2)
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
    head = head_of(torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])))
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


@pytest.mark.parametrize(
    ("step", "due"), [(5, False), (8, False), (9, True), (13, True), (17, False)]
)
def test_it_waits_until_a_prototype_had_its_chance(step, due, monkeypatch):
    from types import SimpleNamespace

    called = []
    monkeypatch.setattr("prismlm.training.revival.revive", lambda *a: called.append(a))
    model = SimpleNamespace(prototype_head=None, usage=Usage(3))
    head = {"initialise_at_step": 5, "revive_every": 4, "revive_until": 0.8}
    callback = ReviveUnused(Recipe(corpus="c", out="o", model={}, steps=20, head=head))
    state = SimpleNamespace(global_step=step)
    callback.on_step_end(None, state, None, model=model, optimizer=object())
    assert bool(called) == due


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
