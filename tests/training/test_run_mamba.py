"""Recurrent models from training to explanation: they would carry a state across documents."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.seam import capture
from prismlm.training import build_recipe, estimate, train
from prismlm.training.setup import prepare
from tests.training.test_run_own_decoders import assert_indexed_and_explained

MAMBA2 = {
    "preset": "mamba-laptop",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "head_dim": 16,
    "num_heads": 4,
}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}


@pytest.fixture(params=[MAMBA, MAMBA2], ids=["mamba", "mamba2"])
def recipe(request, settings):
    settings["model"] = request.param
    settings["optimizer"] = {"learning_rate": 3e-2, "head_learning_rate": 1e-2}
    return build_recipe(settings)


def test_rows_hold_one_document_unless_it_is_said_otherwise(recipe, settings):
    assert not prepare(recipe).rows.shared_rows
    with pytest.raises(InputError, match=r"data\.packing to padded or auto"):
        prepare(build_recipe(settings | {"data": {"length": 32, "packing": "packed"}}))
    llama = {"model": {"preset": "llama-tiny"}}
    for packing, shared in (("auto", True), ("packed", True), ("padded", False)):
        data = {"data": {"length": 32, "packing": packing}}
        assert prepare(build_recipe(settings | llama | data)).rows.shared_rows == shared


def test_states_of_tokens_do_not_depend_on_the_rest_of_the_batch(recipe):
    prepared = prepare(recipe)
    model, rows = prepared.model.model.eval(), prepared.rows
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


def test_it_trains_and_is_indexed_measured_and_explained(recipe):
    expected = estimate(recipe)
    result = train(recipe)
    losses = [row["ce"] for row in result.history if "ce" in row]
    assert losses[-1] < losses[0] - 0.5
    # A uniform guess costs log 2048 = 7.62.
    assert result.quality.ce < 7.3
    assert result.quality.in_use > 0.2
    rows = prepare(recipe).rows
    assert expected.padding == pytest.approx(1 - rows.fill)
    assert result.tokens < recipe.steps * recipe.positions_per_step
    assert_indexed_and_explained(recipe)
