"""λ of signal/noise attention while a model trains, and control signals of feedback."""

import pytest
import torch
from safetensors.torch import load_file

from prismlm.errors import InputError
from prismlm.training import build_recipe, train
from prismlm.training.callbacks import (
    PreviousBatch,
    ShuffledSignal,
    noise_weight_at,
    set_training_signal,
)
from prismlm.training.setup import prepare

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
    """Begin a step."""
    state = type("State", (), {"global_step": step})()
    signal.on_step_begin(None, state, None)  # pyright: ignore[reportArgumentType]


def test_the_order_depends_on_the_seed_the_step_and_the_micro_batch():
    codes, orders = torch.arange(40).view(4, 10), []
    for seed, step in ((3, 7), (3, 7), (3, 8), (4, 7)):
        signal = ShuffledSignal(seed)
        at(signal, step)
        orders.append([signal(codes), signal(codes)])
    assert not torch.equal(*orders[0])
    assert torch.equal(orders[0][1], orders[1][1])
    assert not any(torch.equal(orders[0][0], other) for other, _ in orders[2:])


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


SIGNAL_NOISE = {
    "model_type": "prismlm_signal_noise",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "head_size": 8,
}


@pytest.fixture
def signal_noise(settings):
    settings["model"] = dict(SIGNAL_NOISE)
    settings["head"]["enabled"] = False
    settings["steps"] = 21
    settings["logging"]["every"] = 1
    return settings


def noise_weights(result):
    return [row["noise_weight"] for row in result.history if "noise_weight" in row]


def saved(directory):
    return load_file(directory / "model.safetensors")["model.noise_weight"].item()


def test_the_cosine_by_hand():
    at = [noise_weight_at(step, 5, initial=0.01, final=0.09) for step in range(5)]
    half = 0.04 * (1 - 2**-0.5)
    assert at == pytest.approx([0.01, 0.01 + half, 0.05, 0.09 - half, 0.09])
    assert noise_weight_at(0, 1, initial=0.01, final=0.1) == 0.1
    assert noise_weight_at(3, 9, initial=0.3, final=0.3) == 0.3


def test_it_rises_from_the_first_step_to_the_last_and_is_saved(signal_noise):
    result = train(build_recipe(signal_noise))
    values = noise_weights(result)
    expected = [noise_weight_at(step, 21, initial=0.01, final=0.1) for step in range(21)]
    assert values == pytest.approx(expected, rel=1e-6)
    assert saved(result.directory) == pytest.approx(0.1)
    tenth = result.directory / "checkpoints" / "checkpoint-20"
    assert saved(tenth) == pytest.approx(expected[19])


def test_it_can_be_fixed_or_nothing(signal_noise):
    weights = []
    for value in (0.0, 0.25):
        signal_noise["out"] += "-"
        fixed = {"initial": value, "final": value}
        result = train(build_recipe(signal_noise | {"noise_weight": fixed, "steps": 6}))
        assert set(noise_weights(result)) == {value}
        weights.append(load_file(result.directory / "model.safetensors"))
    drawn = {name: not torch.equal(weights[0][name], weights[1][name]) for name in weights[0]}
    assert drawn["model.layers.0.mlp.up_proj.weight"]


def test_it_is_refused_where_it_means_nothing(settings, signal_noise):
    llama = settings | {"noise_weight": {"final": 0.2}}
    llama["model"] = {"preset": "llama-tiny"}
    with pytest.raises(InputError, match="'llama' has no noise heads"):
        train(build_recipe(llama))
    signal_noise["model"] = SIGNAL_NOISE | {"noise_weight": 0.3}
    with pytest.raises(InputError, match="to the same value"):
        train(build_recipe(signal_noise))
    for value in (-0.1, 1.5):
        with pytest.raises(InputError, match=r"noise_weight\.final"):
            build_recipe(settings | {"noise_weight": {"final": value}})
