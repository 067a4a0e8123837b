"""Each family of decoders from training to explanation, and what a row may hold of it."""

import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.lens.build import IndexOptions, build_index
from prismlm.models.seam import capture
from prismlm.training import build_recipe, train
from prismlm.training.setup import prepare

PROTOT = {"preset": "protot-tiny", "hidden_size": 32, "num_channels": 8}
DELTANET = {"model_type": "prismlm_deltanet", "hidden_size": 32, "num_hidden_layers": 2}
SIGNAL_NOISE = {"preset": "signal-noise-tiny", "hidden_size": 32, "head_size": 8}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
MAMBA2 = {
    "preset": "mamba-laptop",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "head_dim": 16,
    "num_heads": 4,
}
PACKED = {"protot": PROTOT, "deltanet": DELTANET, "signal-noise": SIGNAL_NOISE}
ALONE = {"mamba": MAMBA, "mamba2": MAMBA2}
RATES = {"mamba": 3e-2, "mamba2": 3e-2}
ONE_LAYER = {"model_type": "prismlm_signal_noise", "hidden_size": 24, "num_hidden_layers": 1}
MLPS = {
    "gelu": {},
    "sparse coding": {"mlp": "sparse_coding"},
    "complete dictionary": {"mlp": "sparse_coding", "sparse_coding_form": "complete"},
    "experts": {"mlp": "experts", "num_local_experts": 3, "router_aux_loss_coef": 0.2},
}


def recipe_of(settings, model, rate=1e-2):
    settings["model"] = model
    settings["head"]["detach"] = model not in (MAMBA, MAMBA2)
    settings["optimizer"] = {"learning_rate": rate, "head_learning_rate": 1e-2}
    return build_recipe(settings)


@pytest.mark.parametrize("name", PACKED)
def test_a_token_in_a_packed_row_has_the_state_it_has_alone(settings, name):
    prepared = prepare(recipe_of(settings, PACKED[name]))
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


@pytest.mark.parametrize("name", ALONE)
def test_rows_of_recurrent_models_hold_one_document_whose_padding_changes_nothing(settings, name):
    prepared = prepare(recipe_of(settings, ALONE[name]))
    model, rows = prepared.model.model.eval(), prepared.rows
    assert not rows.shared_rows
    with pytest.raises(InputError, match=r"data\.packing to padded or auto"):
        prepare(build_recipe(settings | {"data": {"length": 32, "packing": "packed"}}))
    short = [i for i in range(len(rows)) if rows[i]["token_mask"].sum() < 20][:3]
    full = [i for i in range(len(rows)) if rows[i]["token_mask"].all()][:1]
    batch = [rows[i] for i in short + full]
    columns = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
    del columns["labels"]
    with torch.no_grad(), capture(model) as together:
        prepared.model(**columns)
    for row, item in enumerate(batch):
        ids = item["input_ids"][item["token_mask"]]
        with torch.no_grad(), capture(model) as alone:
            model(input_ids=ids[None], use_cache=False)
        torch.testing.assert_close(together.z[row, : len(ids)], alone.z[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", PACKED | ALONE)
def test_a_family_trains_with_a_head_and_is_indexed_and_explained(settings, name):
    recipe = recipe_of(settings, (PACKED | ALONE)[name], RATES.get(name, 1e-2))
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


@pytest.mark.parametrize("name", MLPS)
def test_each_mlp_trains_with_a_head_and_generates(name, settings):
    settings["gradient_accumulation"] = 2
    model = ONE_LAYER | {"hidden_size": 32, "head_size": 8} | MLPS[name]
    recipe = recipe_of(settings, model)
    result = train(recipe)
    losses = [row["ce"] for row in result.history if "ce" in row]
    # The complete dictionary, d² parameters and a stream of ReLU's output, learns slowest: 7.28.
    assert losses[-1] < losses[0] - 0.25
    # A uniform guess costs log 2048 = 7.62.
    assert result.quality.ce < 7.4
    trace = prismlm.load(recipe.out).explain("The river", generate=2)
    assert sum(step.target_from == "generated" for step in trace) == 2
