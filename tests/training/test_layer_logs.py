"""Figures of channels while a model trains, in its history."""

import json
import math
from copy import deepcopy

import pytest
import torch
import yaml
from safetensors.torch import load_file

from prismlm.corpus import Corpus
from prismlm.errors import Interrupted
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe, train
from prismlm.training.evaluation import HeldOut
from prismlm.training.layer_logs import channels_figures
from tests.helpers import forked
from tests.helpers.runs import InterruptAfter

PROTOT = {
    "preset": "protot-tiny",
    "hidden_size": 32,
    "num_channels": 8,
    "alpha": 0.5,
    "decay": 0.75,
    "shared_gate_temperature": 3.0,
    "gate_temperature": 1.5,
}
DRAWN = ("alpha", "tau_write", "half_life_median", "write_use_gini", "read_top_share")


def with_layers(settings, model, **changes):
    settings = deepcopy(settings) | {"model": dict(model)} | changes
    settings["head"]["enabled"] = False
    settings["evaluation"]["channel_tokens"] = 300
    return settings


@pytest.fixture
def protot(settings):
    return with_layers(settings, PROTOT)


@pytest.fixture(scope="module")
def straight(same_settings, tmp_path_factory):
    """The run of `protot`, without a stop."""
    out = tmp_path_factory.mktemp("straight") / "model"
    return train(build_recipe(with_layers(same_settings, PROTOT, out=str(out))))


def read(out):
    """Return the figures of each layer by the step of a history."""
    layers = {}
    for row in map(json.loads, (out / "training.jsonl").read_text().splitlines()):
        for key, value in row.items():
            if key.startswith("eval_channels/"):
                _, layer, name = key.split("/")
                layers.setdefault(row["step"], ({}, {}))[int(layer)][name] = value
    return layers


def test_every_evaluation_and_the_end_have_the_figures_of_each_layer(straight):
    layers = read(straight.directory)
    assert list(layers) == [10, 20, 30]
    assert {"tau_read", "half_life_q75", "gate_tokens"} <= layers[10][0].keys()
    for row in (row for both in layers.values() for row in both):
        assert 300 <= row["gate_tokens"] < 400
        for gate in ("write", "read"):
            assert 0 <= row[f"{gate}_use_gini"] <= row[f"{gate}_gini"] <= 7 / 8
            assert 1 / 8 <= row[f"{gate}_top_channel_share"] <= row[f"{gate}_top_share"] <= 1
    last = straight.history[-1]
    assert (last["step"], last["final_ce"]) == (30, straight.ce)
    assert last["final_tokens"] > straight.history[-2].get("eval_tokens", 0)


def test_the_last_figures_match_the_saved_model(straight):
    first, second = read(straight.directory)[30]
    saved = load_file(straight.directory / "model.safetensors")
    for layer, row in enumerate((first, second)):
        tensors = {
            name: saved[f"model.layers.{layer}.mixer.{name}"]
            for name in ("alpha", "log_write_temperature", "decay_logits")
        }
        assert row["alpha"] == pytest.approx(tensors["alpha"].item(), rel=1e-6)
        assert row["tau_write"] == pytest.approx(tensors["log_write_temperature"].exp().item())
        lives = -math.log(2) / tensors["decay_logits"].double().sigmoid().log()
        for name, value in (("min", lives.min()), ("max", lives.max())):
            assert row[f"half_life_{name}"] == pytest.approx(value.item(), rel=1e-5)
    # Layer 0 shares its gates, and only there is one temperature both.
    assert first["tau_read"] == first["tau_write"]
    other = saved["model.layers.1.mixer.log_read_temperature"].exp().item()
    assert second["tau_read"] == pytest.approx(other)
    assert second["read_gini"] != second["write_gini"]


def test_reading_changes_no_weight_and_can_be_left_out(protot, straight):
    protot["evaluation"]["channel_tokens"] = 0
    out = train(build_recipe(protot)).directory
    assert not read(out)
    first, second = (load_file(o / "model.safetensors") for o in (straight.directory, out))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_resumed_run_has_the_figures_of_the_straight_one_and_draws_them(protot, straight):
    from tensorboard.backend.event_processing import event_accumulator

    protot["logging"]["tensorboard"] = True
    recipe = build_recipe(protot)
    with pytest.raises(Interrupted):
        train(recipe, progress=InterruptAfter(13))
    train(recipe, resume=True)
    layers = read(recipe.out)
    assert layers == read(straight.directory)
    drawn = event_accumulator.EventAccumulator(str(recipe.out / "tensorboard"))
    drawn.Reload()
    for layer in (0, 1):
        for name in DRAWN:
            events = drawn.Scalars(f"eval/channels/{layer}/{name}")
            assert [event.step for event in events] == [10, 20]
            values = [layers[step][layer][name] for step in (10, 20)]
            assert [event.value for event in events] == pytest.approx(values, rel=1e-5)


COMPILED = """
import sys, yaml
from functools import partial
from torch._dynamo.backends.debugging import aot_eager
from prismlm.training import build_recipe, parallel, train
graphs = []
def backend(graph, example_inputs):
    graphs.append(graph)
    return aot_eager(graph, example_inputs)
parallel.compile_blocks = partial(parallel.compile_blocks, backend=backend)
train(build_recipe(yaml.safe_load(open(sys.argv[1]))))
print(len(graphs))
"""


def test_a_compiled_model_trains_and_is_read_as_one_that_is_not(protot, straight, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(protot | {"compile": True}))
    # A separate process: the run-time type checks of the test run cannot be traced.
    done = forked.run(recipe, code=COMPILED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "the blocks were compiled"
    lines = (tmp_path / "model" / "training.jsonl").read_text().splitlines()
    for line, expected in zip(lines, straight.history, strict=True):
        row = json.loads(line)
        names = [name for name in row if "ce" in name or "gini" in name]
        assert [row[n] for n in names] == pytest.approx([expected[n] for n in names], rel=1e-3)


def untrained(settings, corpus):
    """Return the figures that a model has before its training."""
    opened = Corpus.open(corpus)
    model = build_model(build_config(settings, len(opened.tokenizer), opened.eos_token_id))
    return channels_figures(model, HeldOut(opened, 32, 0).batches(100))


def test_at_the_start_the_figures_are_the_configuration(tiny_corpus):
    first, second = untrained(PROTOT, tiny_corpus)
    # −ln 2 / ln ¾ = 2.409 positions.
    expected = {"alpha": 0.5, "half_life_min": 2.409421, "half_life_median": 2.409421}
    for row, temperature in ((first, 3.0), (second, 1.5)):
        for name, value in (
            expected | dict.fromkeys(("tau_write", "tau_read"), temperature)
        ).items():
            assert row[name] == pytest.approx(value, rel=1e-5), name


def test_decays_by_token_have_no_half_lives(tiny_corpus):
    for row in untrained(PROTOT | {"decay_mode": "token"}, tiny_corpus):
        missing = {name for name, value in row.items() if math.isnan(value)}
        assert missing == {f"half_life_{name}" for name in ("min", "q25", "median", "q75", "max")}
