"""Each family of decoders, and uncertainty feedback, from training to explanation."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError, Interrupted
from prismlm.lens.build import IndexOptions, build_index
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.training import build_recipe, train
from prismlm.training.setup import PreviousBatch, prepare, set_training_signal
from prismlm.training.trainer import noise_weight_at
from tests.helpers.interrupted import InterruptAfter

PROTOT = {"preset": "protot-tiny", "hidden_size": 32, "num_channels": 8}
DELTANET = {"model_type": "prismlm_deltanet", "hidden_size": 32, "num_hidden_layers": 2}
SIGNAL_NOISE = {"preset": "signal-noise-tiny", "hidden_size": 32, "head_size": 8}
MAMBA2 = {"preset": "mamba-laptop", "hidden_size": 32, "num_hidden_layers": 2}
MAMBA2 |= {"state_size": 8, "head_dim": 16, "num_heads": 4}
PACKED = {"protot": PROTOT, "deltanet": DELTANET, "signal-noise": SIGNAL_NOISE}


def recipe_of(settings, model):
    settings["model"] = model
    settings["head"]["detach"] = model != MAMBA2
    rate = 3e-2 if model == MAMBA2 else 1e-2
    settings["optimizer"] = {"learning_rate": rate, "head_learning_rate": 1e-2}
    return build_recipe(settings)


def run(model, *rows, **inputs):
    """Return the states and the output of a forward pass, of rows or of other inputs."""
    if rows:
        names = ("input_ids", "position_ids")
        inputs = {name: torch.stack([row[name] for row in rows]) for name in names}
    with torch.no_grad(), capture(model) as seen:
        output = model(**inputs, use_cache=False)
    return seen.z, output


def pieces_of(rows, index):
    """Return the tokens and the place of each document in a row."""
    ends = np.cumsum(rows.pieces(index)[1])
    spans = [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]
    return [(rows[index]["input_ids"][None, span], span) for span in spans]


@pytest.mark.parametrize("name", [*PACKED, "fed back"])
def test_a_token_in_a_packed_row_has_the_state_it_has_alone(settings, name):
    recipe = recipe_of(settings, PACKED.get(name, settings["model"]))
    if name == "fed back":
        feedback = {"enabled": True, "levels": 64}
        recipe = build_recipe(settings | {"uncertainty_feedback": feedback})
    prepared = prepare(recipe)
    rows, model = prepared.rows, prepared.model.model.eval()
    assert rows.shared_rows
    shared = [i for i in range(len(rows)) if len(rows.pieces(i)[0]) > 1][:3]
    together, output = run(model, *(rows[i] for i in shared))
    for row, index in enumerate(shared):
        for ids, span in pieces_of(rows, index):
            alone, single = run(model, input_ids=ids)
            torch.testing.assert_close(together[row, span], alone[0], atol=1e-5, rtol=1e-4)
            if name == "fed back":
                # Nor do documents know each other's uncertainty.
                codes = output.uncertainty_codes[row, span]
                assert torch.equal(codes, single.uncertainty_codes[0])


def test_rows_of_recurrent_models_hold_one_document_whose_padding_changes_nothing(settings):
    prepared = prepare(recipe_of(settings, MAMBA2))
    model, rows = prepared.model.model.eval(), prepared.rows
    assert not rows.shared_rows
    with pytest.raises(InputError, match=r"data\.packing to padded or auto"):
        prepare(build_recipe(settings | {"data": {"length": 32, "packing": "packed"}}))
    short = [i for i in range(len(rows)) if rows[i]["token_mask"].sum() < 20][:3]
    full = [i for i in range(len(rows)) if rows[i]["token_mask"].all()][:1]
    batch = [rows[i] for i in short + full]
    together, _ = run(model, *batch)
    for z, item in zip(together, batch, strict=True):
        ids = item["input_ids"][item["token_mask"]]
        alone, _ = run(model, input_ids=ids[None])
        torch.testing.assert_close(z[: len(ids)], alone[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["protot", "signal-noise", "mamba2"])
def test_a_family_trains_with_a_head_and_is_indexed_and_explained(settings, name):
    recipe = recipe_of(settings, (PACKED | {"mamba2": MAMBA2})[name])
    result = train(recipe)
    losses = [row["ce"] for row in result.history if "ce" in row]
    assert losses[-1] < losses[0] - 0.5
    # A uniform guess costs log 2048 = 7.62.
    assert result.quality.ce < 7.3
    if name in PACKED:
        assert result.quality.prototype_only_ce < 7.4
    else:
        assert result.quality.in_use > 0.2
        assert result.tokens < recipe.steps * recipe.positions_per_step
    lm = prismlm.load(recipe.out)
    corpus = Corpus.open(recipe.corpus)
    options = IndexOptions(contexts=4, window=32, stride=24, split="heldout")
    build_index(lm.model, lm.head, corpus, recipe.out / "lens" / "sample", options)
    lm = prismlm.load(recipe.out)
    trace = lm.explain("The river", generate=3)
    assert sum(step.target_from == "generated" for step in trace) == 3
    shares = trace.sources("domain")
    assert sum(i.share for i in shares.items) + shares.unattributed == pytest.approx(1, abs=1e-6)


TABLE = "uncertainty_feedback.safetensors"


@pytest.fixture
def fed_back(settings):
    settings["uncertainty_feedback"] = {"enabled": True, "levels": 64, "passes": 2}
    settings["head"]["enabled"] = False
    settings["logging"]["every"] = 1
    settings["steps"] = 20
    return settings


def test_the_table_learns_where_codes_were_seen_and_is_saved(fed_back):
    start = prepare(build_recipe(fed_back)).model.uncertainty.embedding.weight.detach().clone()
    assert not start.any()  # so that a run begins as one without feedback
    result = train(build_recipe(fed_back))
    table = load_file(result.directory / TABLE)["embedding"]
    moved = (table != start).any(1)
    seen = [row["uncertainty_codes_seen"] for row in result.history if "loss" in row]
    assert seen == sorted(seen)
    # A code that only a row's last token had is in no loss.
    assert seen[-1] - 4 <= int(moved.sum()) <= seen[-1] < 64
    model, _ = read_checkpoint(result.directory)
    feedback = uncertainty_of(model)
    assert torch.equal(feedback.embedding.weight, table)
    assert feedback.passes == 2
    output = model(torch.tensor([[5, 6, 7]]), use_cache=False)
    assert output.uncertainty_codes[0, 0] == -1


@pytest.mark.parametrize("signal", ["shuffled", "previous_batch"])
def test_a_stopped_run_is_resumed_with_its_table_and_codes(fed_back, tmp_path, signal):
    fed_back["uncertainty_feedback"]["signal"] = signal
    fed_back["steps"] = 8
    straight = train(build_recipe(fed_back | {"out": str(tmp_path / "straight")}))
    recipe = build_recipe(fed_back)
    with pytest.raises(Interrupted):
        train(recipe, progress=InterruptAfter(4))
    resumed = train(recipe, resume=True)
    for name in ("model.safetensors", TABLE):
        ours, theirs = (load_file(run.directory / name) for run in (resumed, straight))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_shuffled_signal_has_the_same_codes_in_another_order_in_training_only(settings):
    settings["head"]["enabled"] = False
    # With dropout, the two models would not predict alike.
    settings["model"]["attention_dropout"] = 0.0
    fed = []
    for signal in ("own", "shuffled"):
        # Predictions of the first steps are nearly alike: only fine codes tell them apart.
        settings["uncertainty_feedback"] = {"enabled": True, "levels": 65536, "signal": signal}
        prepared = prepare(build_recipe(settings))
        set_training_signal(prepared.recipe, prepared.model)
        rows = [prepared.rows[i] for i in range(4)]
        for training in (True, False):
            _, output = run(prepared.model.model.train(training), *rows)
            fed.append(output.uncertainty_codes)
    own, own_evaluated, other, other_evaluated = fed
    assert torch.equal(own.flatten().sort().values, other.flatten().sort().values)
    assert torch.equal(own < 0, other < 0)
    assert (own != other).double().mean() > 0.2
    assert torch.equal(own, own_evaluated)
    assert torch.equal(own_evaluated, other_evaluated)


def test_the_previous_batch_as_a_signal():
    signal, codes = PreviousBatch(64), torch.full((2, 4), 5)
    assert torch.equal(signal(codes), torch.tensor([[-1, 32, 32, 32]] * 2))
    certain = torch.zeros(2, 3, 7)
    certain[0, :, 0] = 100.0
    signal.remember(certain)
    assert torch.equal(signal(codes), torch.tensor([[-1, 0, 0, 0], [-1, 63, 63, 63]]))
    assert torch.equal(signal(codes[:, :2]), torch.tensor([[-1, 0], [-1, 63]]))
    # Longer than the batch before: neutral. Other numbers of rows: nothing is known of them.
    assert signal(torch.full((2, 6), 5))[1].tolist() == [-1, 63, 63, 63, 32, 32]
    assert set(signal(torch.full((3, 4), 5)).flatten().tolist()) == {-1, 32}


@pytest.fixture
def signal_noise(settings):
    settings["model"] = {"model_type": "prismlm_signal_noise", "num_hidden_layers": 2}
    settings["model"] |= {"hidden_size": 32, "head_size": 8}
    settings["head"]["enabled"] = False
    settings["logging"]["every"] = 1
    return settings | {"steps": 21}


def test_the_noise_weight_rises_from_the_first_step_to_the_last_and_is_saved(signal_noise):
    result = train(build_recipe(signal_noise))
    values = [row["noise_weight"] for row in result.history if "noise_weight" in row]
    expected = [0.055 - 0.045 * math.cos(math.pi * step / 20) for step in range(21)]
    assert values == pytest.approx(expected, rel=1e-6)
    assert noise_weight_at(0, 1, initial=0.01, final=0.1) == 0.1
    checkpoint = result.directory / "checkpoints" / "checkpoint-20"
    for directory, value in ((result.directory, 0.1), (checkpoint, expected[19])):
        saved = load_file(directory / "model.safetensors")["model.noise_weight"]
        assert saved.item() == pytest.approx(value)


def test_a_noise_weight_that_means_nothing_is_refused(settings, signal_noise):
    signal_noise["model"]["noise_weight"] = 0.3
    llama = settings | {"noise_weight": {"final": 0.2}, "model": {"preset": "llama-tiny"}}
    for wrong in (signal_noise, llama):
        with pytest.raises(InputError, match="noise_weight is a section of its own"):
            train(build_recipe(wrong))
