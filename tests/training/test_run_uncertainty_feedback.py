"""Uncertainty feedback trained with a model: its table and its file."""

import pytest
import torch
from safetensors.torch import load_file

import prismlm
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.training import build_recipe, train
from prismlm.training.setup import prepare

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
    result = train(build_recipe(fed_back))
    table = load_file(result.directory / TABLE)["embedding"]
    moved = (table != start).any(1)
    seen = [row["uncertainty_codes_seen"] for row in result.history if "loss" in row]
    assert seen == sorted(seen)
    # A code that only a row's last token had is in no loss.
    assert seen[-1] - 4 <= int(moved.sum()) <= seen[-1] < 64
    # Untrained predictions are nearly uniform: codes begin near the top.
    assert moved[-1] or moved[-2] or moved[-3]
    model, _ = read_checkpoint(result.directory)
    feedback = uncertainty_of(model)
    assert torch.equal(feedback.embedding.weight, table)
    assert feedback.passes == 2
    output = model(torch.tensor([[5, 6, 7]]), use_cache=False)
    assert output.uncertainty_codes[0, 0] == -1


def test_a_table_from_zero_begins_as_the_model_without_feedback(fed_back):
    fed_back["uncertainty_feedback"] |= {"deviation": 0.0}
    fed_back["model"]["attention_dropout"] = 0.0
    fed_back["steps"] = 8
    begun = prepare(build_recipe(fed_back)).model.uncertainty.embedding.weight
    assert not begun.any()
    actual = train(build_recipe(fed_back))
    plain = train(
        build_recipe(fed_back | {"uncertainty_feedback": {}, "out": fed_back["out"] + "-plain"})
    )
    losses = [
        [row["loss"] for row in result.history if "loss" in row] for result in (actual, plain)
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-6)
    assert losses[0][-1] != losses[1][-1]


def test_beside_a_head_the_decoder_is_that_without_one(fed_back, tmp_path):
    plain = train(build_recipe(fed_back | {"out": str(tmp_path / "plain")}))
    fed_back["head"] |= {"enabled": True, "detach": True}
    headed = train(build_recipe(fed_back))
    for ours, theirs in zip(files(headed), files(plain), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lm = prismlm.load(headed.directory)
    for text, new in (("The river", 3), ("The river and the old man went", 0)):
        steps = list(lm.explain(text, generate=new))
        ids = torch.tensor([[step.token_id for step in steps]])
        with torch.no_grad():
            whole = lm.model(ids, use_cache=False).uncertainty_codes[0]
        prompt = len(lm.tokenizer(text).input_ids)
        expected = [None if code < 0 else code / 63 for code in whole.tolist()]
        found = [step.uncertainty for step in steps]
        assert found[:prompt] == pytest.approx(expected[:prompt])
        assert found[0] is None
        # Of what is generated, the code of the prediction before it.
        assert all(0 < share <= 1 for share in found[1:])
        assert steps[-1].to_dict()["uncertainty"] == found[-1]


def test_documents_of_a_packed_row_know_nothing_of_each_others_uncertainty(fed_back):
    prepared = prepare(build_recipe(fed_back))
    rows, model = prepared.rows, prepared.model.model.eval()
    at = next(i for i in range(len(rows)) if len(rows.pieces(i)[0]) > 1)
    batch = {name: rows[at][name][None] for name in rows[at]}
    with torch.no_grad():
        together = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        )
        first = 0
        for size in rows.pieces(at)[1].tolist():
            ids = batch["input_ids"][:, first : first + size]
            alone = model(input_ids=ids, use_cache=False)
            model_codes = together.uncertainty_codes[:, first : first + size]
            assert torch.equal(model_codes, alone.uncertainty_codes)
            torch.testing.assert_close(
                together.logits[:, first : first + size], alone.logits, atol=1e-4, rtol=1e-4
            )
            first += size
