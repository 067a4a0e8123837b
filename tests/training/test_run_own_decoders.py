"""Own decoders from training to explanation, their documents packed into shared rows."""

import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.index.build import IndexOptions, build_index
from prismlm.models.seam import capture
from prismlm.training import build_recipe, estimate, train
from prismlm.training.setup import prepare

PROTOT = {"preset": "protot-tiny", "hidden_size": 32, "num_channels": 8}


DELTANET = {"model_type": "prismlm_deltanet", "hidden_size": 32, "num_hidden_layers": 2}


SIGNAL_NOISE = {"preset": "signal-noise-tiny", "hidden_size": 32, "head_size": 8}


@pytest.fixture(params=[PROTOT, DELTANET, SIGNAL_NOISE], ids=["protot", "deltanet", "signal-noise"])
def recipe(request, settings):
    settings["model"] = request.param
    settings["head"]["detach"] = True
    settings["optimizer"] = {"learning_rate": 1e-2, "head_learning_rate": 1e-2}
    return build_recipe(settings)


def test_a_token_in_a_packed_row_has_the_state_it_has_alone(recipe):
    prepared = prepare(recipe)
    rows, model = prepared.rows, prepared.model.model.eval()
    assert rows.shared_rows
    shared = [i for i in range(len(rows)) if len(rows.pieces(i)[0]) > 1][:3]
    batch = {name: torch.stack([rows[i][name] for i in shared]) for name in rows[0]}
    with torch.no_grad(), capture(model) as together:
        prepared.model(**batch)
    for row, i in enumerate(shared):
        at = 0
        for size in rows.pieces(i)[1].tolist():
            ids = batch["input_ids"][row : row + 1, at : at + size]
            with torch.no_grad(), capture(model) as alone:
                model(input_ids=ids, use_cache=False)
            torch.testing.assert_close(
                together.z[row, at : at + size], alone.z[0], atol=1e-5, rtol=1e-4
            )
            at += size


def assert_indexed_and_explained(recipe):
    lm = prismlm.load(recipe.out)
    corpus = Corpus.open(recipe.corpus)
    options = IndexOptions(contexts=4, window=32, stride=24, split="heldout")
    build_index(lm.model, lm.head, corpus, recipe.out / "lens" / "sample", options)
    lm = prismlm.load(recipe.out)
    trace = lm.explain("The river", generate=3)
    assert sum(step.target_from == "generated" for step in trace) == 3
    shares = trace.sources("domain")
    assert sum(i.share for i in shares.items) + shares.unattributed == pytest.approx(1, abs=1e-6)


def test_it_trains_with_a_head_and_is_indexed_and_explained(recipe):
    expected = estimate(recipe)
    result = train(recipe)
    losses = [row["ce"] for row in result.history if "ce" in row]
    assert losses[-1] < losses[0] - 0.5
    # A uniform guess costs log 2048 = 7.62.
    assert result.quality.ce < 7.3
    assert result.quality.prototype_only_ce < 7.4
    assert expected.padding < 0.1
    assert_indexed_and_explained(recipe)
