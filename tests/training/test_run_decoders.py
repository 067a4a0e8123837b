"""Each family of decoders, and uncertainty feedback, from training to explanation."""

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
from prismlm.training.setup import prepare
from tests.helpers.interrupted import InterruptAfter

PROTOT = {"preset": "protot-tiny", "hidden_size": 32, "num_channels": 8}
DELTANET = {"model_type": "prismlm_deltanet", "hidden_size": 32, "num_hidden_layers": 2}
SIGNAL_NOISE = {"preset": "signal-noise-tiny", "hidden_size": 32, "head_size": 8}
MAMBA2 = {
    "preset": "mamba-laptop",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "head_dim": 16,
    "num_heads": 4,
}
RATES = {"mamba2": 3e-2}
PACKED = {"protot": PROTOT, "deltanet": DELTANET, "signal-noise": SIGNAL_NOISE}


def recipe_of(settings, model, rate=1e-2):
    settings["model"] = model
    settings["head"]["detach"] = model != MAMBA2
    settings["optimizer"] = {"learning_rate": rate, "head_learning_rate": 1e-2}
    return build_recipe(settings)


def run(model, **inputs):
    """Return the states and the output of a forward pass."""
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
    names = ("input_ids", "position_ids")
    together, output = run(model, **{n: torch.stack([rows[i][n] for i in shared]) for n in names})
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
    names = ("input_ids", "position_ids")
    together, _ = run(model, **{n: torch.stack([row[n] for row in batch]) for n in names})
    for z, item in zip(together, batch, strict=True):
        ids = item["input_ids"][item["token_mask"]]
        alone, _ = run(model, input_ids=ids[None])
        torch.testing.assert_close(z[: len(ids)], alone[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["protot", "signal-noise", "mamba2"])
def test_a_family_trains_with_a_head_and_is_indexed_and_explained(settings, name):
    recipe = recipe_of(settings, (PACKED | {"mamba2": MAMBA2})[name], RATES.get(name, 1e-2))
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


def files(result):
    return [load_file(result.directory / name) for name in ("model.safetensors", TABLE)]


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
    for ours, theirs in zip(files(resumed), files(straight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
