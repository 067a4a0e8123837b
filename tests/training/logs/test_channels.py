"""What channels do while a model trains: channels.csv, of whole and resumed runs."""

import csv
import math
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file

from prismlm.errors import DivergenceError, FormatError
from prismlm.models.presets import build_config, build_model
from prismlm.training import TrainingInterrupted, build_recipe, train
from prismlm.training.logs.channels import COLUMNS, channels_figures
from prismlm.training.logs.layers import EVALUATED, PLACE, LayerLog
from prismlm.training.setup import prepare
from tests.helpers.layer_logs import run_of
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
FIRST = ("alpha", "tau_write", "tau_read", "half_life_median")


def with_mixers(settings):
    settings["model"] = dict(PROTOT)
    settings["head"]["enabled"] = False
    settings["evaluation"]["channel_tokens"] = 300
    return settings


@pytest.fixture
def protot(settings):
    return with_mixers(settings)


@pytest.fixture(scope="module")
def straight(same_settings, tmp_path_factory):
    """The run of `protot`, without a stop."""
    out = tmp_path_factory.mktemp("straight") / "model"
    return train(build_recipe(with_mixers(deepcopy(same_settings)) | {"out": str(out)}))


def read(out):
    with (out / "channels.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_every_evaluation_and_the_end_have_a_row_for_each_layer(protot, straight):
    result = straight
    rows = read(result.directory)
    assert tuple(rows[0]) == (*PLACE, *COLUMNS, *EVALUATED)
    assert [(row["step"], row["layer"]) for row in rows] == [
        (step, layer) for step in (10, 20, 30) for layer in (0, 1)
    ]
    evaluated = {row["step"]: row for row in result.history if "eval_ce" in row}
    for row in rows:
        step = int(row["step"])
        ce = result.ce if step == 30 else evaluated[step]["eval_ce"]
        assert row["ce"] == ce
        assert row["perplexity"] == pytest.approx(math.exp(ce))
        assert 300 <= row["gate_tokens"] < 400
        for gate in ("write", "read"):
            assert 0 <= row[f"{gate}_use_gini"] <= row[f"{gate}_gini"] <= 7 / 8
            assert 1 / 8 <= row[f"{gate}_top_channel_share"] <= row[f"{gate}_top_share"] <= 1
    assert rows[-1]["ce_tokens"] > rows[0]["ce_tokens"] > 0
    seen = next(row["tokens"] for row in result.history if row["step"] == 20 and "tokens" in row)
    text = prepare(build_recipe(protot)).rows.num_tokens
    assert [row["epoch"] for row in rows[2:4]] == [seen / text] * 2
    assert rows[-1]["epoch"] == result.tokens / text


def test_what_the_last_rows_say_is_what_the_saved_model_holds(protot):
    protot["evaluation"]["every"] = 0
    result = train(build_recipe(protot))
    first, second = read(result.directory)
    saved = load_file(result.directory / "model.safetensors")
    for layer, row in enumerate((first, second)):
        own = {
            name: saved[f"model.layers.{layer}.mixer.{name}"]
            for name in ("alpha", "log_write_temperature", "decay_logits")
        }
        assert row["alpha"] == pytest.approx(own["alpha"].item(), rel=1e-6)
        assert row["tau_write"] == pytest.approx(own["log_write_temperature"].exp().item())
        lives = -math.log(2) / own["decay_logits"].double().sigmoid().log()
        for name, value in (("min", lives.min()), ("max", lives.max())):
            assert row[f"half_life_{name}"] == pytest.approx(value.item(), rel=1e-5)
    # Layer 0 shares its gates, and only there is one temperature both.
    assert first["tau_read"] == first["tau_write"]
    assert first["read_gini"] == first["write_gini"]
    other = saved["model.layers.1.mixer.log_read_temperature"].exp().item()
    assert second["tau_read"] == pytest.approx(other)
    assert second["read_gini"] != second["write_gini"]


def untrained(settings, corpus, directory):
    """Return the rows that a model has before its training."""
    from prismlm.corpus import Corpus
    from prismlm.training.evaluation import HeldOut

    opened = Corpus.open(corpus)
    model = build_model(build_config(settings, len(opened.tokenizer), opened.eos_token_id))
    heldout = HeldOut(opened, 32, 0)
    log = LayerLog(
        *run_of(directory, tokens=50, corpus_tokens=200),
        0,
        "channels.csv",
        columns=COLUMNS,
        counts=("gate_tokens",),
        measure=lambda decoder: channels_figures(decoder, heldout.batches(100)),
    )
    log.add(model, step=1, ce=math.log(7), ce_tokens=11)
    return read(directory)


def test_at_the_start_the_rows_are_the_configuration(tiny_corpus, tmp_path):
    first, second = untrained(PROTOT, tiny_corpus, tmp_path)
    # −ln 2 / ln ¾ = 2.409 positions.
    expected = {"alpha": 0.5, "half_life_min": 2.409421, "half_life_median": 2.409421}
    expected |= {"epoch": 0.25, "perplexity": 7.0, "ce_tokens": 11}
    for row, temperature in ((first, 3.0), (second, 1.5)):
        for name, value in (
            expected | dict.fromkeys(("tau_write", "tau_read"), temperature)
        ).items():
            assert row[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("ce", [math.nan, math.inf])
def test_a_cross_entropy_that_is_not_finite_is_divergence_and_nothing_is_read(tmp_path, ce):
    def measure(decoder):
        raise AssertionError("read")

    log = LayerLog(*run_of(tmp_path), 0, "channels.csv", columns=COLUMNS, measure=measure)
    with pytest.raises(
        DivergenceError, match=f"cross-entropy is {ce} after step 20. No checkpoint"
    ):
        log.add(torch.nn.Identity(), step=20, ce=ce, ce_tokens=11)
    assert not list(tmp_path.iterdir())


def test_decays_by_token_have_no_half_lives(tiny_corpus, tmp_path):
    for row in untrained(PROTOT | {"decay_mode": "token"}, tiny_corpus, tmp_path):
        missing = {name for name, value in row.items() if math.isnan(value)}
        assert missing == {f"half_life_{name}" for name in ("min", "q25", "median", "q75", "max")}


def test_no_rows_are_written_without_mixers_or_when_none_are_asked_for(settings, protot, tmp_path):
    protot |= {"steps": 6}
    off = protot | {"evaluation": protot["evaluation"] | {"channel_tokens": 0}}
    assert not (train(build_recipe(off)).directory / "channels.csv").exists()
    llama = settings | {"model": {"preset": "llama-tiny"}, "out": str(tmp_path / "llama")}
    assert not (train(build_recipe(llama)).directory / "channels.csv").exists()


def test_measuring_channels_changes_no_weight(protot, straight):
    protot["evaluation"]["channel_tokens"] = 0
    without = train(build_recipe(protot)).directory
    first, second = (load_file(out / "model.safetensors") for out in (straight.directory, without))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("stop_at", [5, 13])
def test_a_resumed_run_has_the_rows_of_the_straight_one(protot, straight, stop_at):
    recipe = build_recipe(protot)
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(stop_at))
    train(recipe, resume=True)
    assert read(recipe.out) == read(straight.directory)
    # A finished run measures its end again.
    train(recipe, resume=True)
    assert read(recipe.out) == read(straight.directory)


def test_a_foreign_file_is_not_overwritten(protot):
    recipe = build_recipe(protot)
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(12))
    file = recipe.out / "channels.csv"
    text = file.read_text()
    for damage in ("step,mine\n1,2\n", text + "20,half"):
        file.write_text(damage)
        with pytest.raises(FormatError, match=r"channels\.csv .* Move it away"):
            train(recipe, resume=True)
        assert file.read_text() == damage


def test_tensorboard_draws_them(protot):
    from tensorboard.backend.event_processing import event_accumulator

    protot["logging"]["tensorboard"] = True
    recipe = build_recipe(protot)
    with pytest.raises(TrainingInterrupted):
        train(recipe, progress=InterruptAfter(12))
    train(recipe, resume=True)
    drawn = event_accumulator.EventAccumulator(str(recipe.out / "tensorboard" / "channels"))
    drawn.Reload()
    rows = read(recipe.out)
    for layer in (0, 1):
        for name in (*FIRST, "write_use_gini", "read_top_share", "epoch"):
            events = drawn.Scalars(f"layer {layer}/{name}")
            expected = [(row["step"], row[name]) for row in rows if row["layer"] == layer]
            assert [event.step for event in events] == [step for step, _ in expected]
            values = [value for _, value in expected]
            assert [event.value for event in events] == pytest.approx(values, rel=1e-5)
