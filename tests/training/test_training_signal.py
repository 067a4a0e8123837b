"""Other signals than a model's own: codes shuffled, and codes of the batch before."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.ops.uncertainty_feedback import entropy_codes, shuffle_codes
from prismlm.training import build_recipe, train
from prismlm.training.setup import prepare
from prismlm.training.training_signal import PreviousBatch, ShuffledSignal, set_training_signal

CODES = torch.tensor([[-1, 3, 4, 5, 6], [-1, -1, 7, 7, 9]])


@pytest.fixture
def shuffled(settings):
    # Predictions of the first steps are nearly alike: only fine codes tell them apart.
    settings["uncertainty_feedback"] = {"enabled": True, "levels": 65536, "signal": "shuffled"}
    settings["head"]["enabled"] = False
    settings["logging"]["every"] = 1
    settings["steps"] = 14
    return settings


def test_codes_change_places_and_nothing_else():
    found = shuffle_codes(CODES, torch.Generator().manual_seed(0))
    known = CODES >= 0
    assert torch.equal(found >= 0, known)
    assert found[known].sort().values.tolist() == [3, 4, 5, 6, 7, 7, 9]
    assert not torch.equal(found, CODES)
    # Over the rows: with any order within rows the first would keep its sum of 18.
    sums = {
        int(shuffle_codes(CODES, torch.Generator().manual_seed(seed))[0, 1:].sum())
        for seed in range(5)
    }
    assert len(sums) > 1
    none = torch.full((2, 3), -1)
    assert torch.equal(shuffle_codes(none, torch.Generator()), none)


def at(signal, step):
    """Tell it of a step."""
    state = type("State", (), {"global_step": step})()
    signal.on_step_begin(None, state, None)  # pyright: ignore[reportArgumentType]


def test_the_order_is_that_of_the_seed_the_step_and_the_micro_batch():
    codes = torch.arange(40).view(4, 10)
    first, second = ShuffledSignal(3), ShuffledSignal(3)
    for signal in (first, second):
        at(signal, 7)
    drawn = [first(codes), first(codes)]
    assert not torch.equal(*drawn)
    assert torch.equal(second(codes), drawn[0])
    at(first, 8)
    assert not torch.equal(first(codes), drawn[0])
    at(first, 7)
    assert torch.equal(first(codes), drawn[0])
    other = ShuffledSignal(4)
    at(other, 7)
    assert not torch.equal(other(codes), drawn[0])


def test_a_step_feeds_the_codes_of_the_signal_in_order_elsewhere(shuffled):
    fed = []
    for signal in ("own", "shuffled"):
        shuffled["uncertainty_feedback"]["signal"] = signal
        prepared = prepare(build_recipe(shuffled))
        set_training_signal(prepared.recipe, prepared.model.uncertainty)
        rows = [prepared.rows[i] for i in range(4)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        model = prepared.model.model
        arguments = {name: batch[name] for name in ("input_ids", "position_ids")}
        for training in (True, False):
            # Attention drops nothing, or the two would not predict alike.
            model.config.attention_dropout = 0.0
            for layer in model.model.layers:
                layer.self_attn.attention_dropout = 0.0
            model.train(training)
            output = model(**arguments, use_cache=False)
            fed.append(output.uncertainty_codes)
            # What is replayed is left alone.
            again = model(**arguments, use_cache=False, uncertainty_codes=fed[-1])
            assert torch.equal(again.uncertainty_codes, fed[-1])
    own, own_evaluated, other, other_evaluated = fed
    assert torch.equal(own.flatten().sort().values, other.flatten().sort().values)
    assert torch.equal(own < 0, other < 0)
    assert (own != other).double().mean() > 0.2
    assert torch.equal(own, own_evaluated)
    # Only training is out of order.
    assert torch.equal(own_evaluated, other_evaluated)


def test_a_run_is_not_that_of_the_own_signal(shuffled, tmp_path):
    straight = train(build_recipe(shuffled))
    own = shuffled | {"uncertainty_feedback": shuffled["uncertainty_feedback"] | {"signal": "own"}}
    own = train(build_recipe(own | {"out": str(tmp_path / "own")}))
    logs = [[row for row in r.history if "loss" in row] for r in (straight, own)]
    begun = [log[0]["uncertainty_codes_seen"] for log in logs]
    assert begun[0] == begun[1]
    assert logs[0][-1]["loss"] != logs[1][-1]["loss"]


def test_the_signal_of_the_source_is_that_of_the_batch_before():
    signal, codes = PreviousBatch(64), torch.full((2, 4), 5)
    assert torch.equal(signal(codes), torch.tensor([[-1, 32, 32, 32]] * 2))
    certain = torch.zeros(2, 3, 7)
    certain[0, :, 0] = 100.0
    signal.remember(certain)
    assert torch.equal(signal(codes), torch.tensor([[-1, 0, 0, 0], [-1, 63, 63, 63]]))
    assert torch.equal(signal(codes[:, :2]), torch.tensor([[-1, 0], [-1, 63]]))
    # Longer than the batch before: neutral. Other rows: nothing is known of them.
    assert signal(torch.full((2, 6), 5))[1].tolist() == [-1, 63, 63, 63, 32, 32]
    assert set(signal(torch.full((3, 4), 5)).flatten().tolist()) == {-1, 32}


def test_a_model_trains_as_the_source_says_with_the_codes_of_other_texts(shuffled):
    shuffled["uncertainty_feedback"] |= {"signal": "previous_batch", "passes": 1}
    prepared = prepare(build_recipe(shuffled))
    assert set_training_signal(prepared.recipe, prepared.model.uncertainty) == []
    rows = [prepared.rows[i] for i in range(4)]
    model = prepared.model.model.train()
    batches = [
        {"input_ids": torch.stack([r["input_ids"] for r in rows[i : i + 2]])} for i in (0, 2)
    ]
    first, second = (model(**batch, use_cache=False) for batch in batches)
    predicted = entropy_codes(first.logits, 65536)
    assert torch.equal(second.uncertainty_codes[:, 1:], predicted[:, :-1])
    assert set(second.uncertainty_codes[:, 0].tolist()) == {-1}


def test_one_pass_has_nothing_to_shuffle(shuffled):
    shuffled["uncertainty_feedback"]["passes"] = 1
    with pytest.raises(InputError, match=r"looks the same in any order; choose passes: 2"):
        build_recipe(shuffled)
    shuffled["uncertainty_feedback"] |= {"passes": 2, "signal": "other"}
    with pytest.raises(InputError, match=r"signal.*'own', 'shuffled' or"):
        build_recipe(shuffled)
