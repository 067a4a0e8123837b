"""Other signals than a model's own: codes shuffled, and codes of the batch before."""

import pytest
import torch

from prismlm.training import build_recipe
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
