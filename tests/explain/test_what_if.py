"""What an answer would be without documents: both estimates beside loops over every position."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import prismlm
from prismlm.errors import InputError
from prismlm.explain import what_if as module
from prismlm.explain.what_if import METHODS, calibration, removed_documents, what_if
from tests.helpers.chats import TEMPLATE

TEXT = "The cell is the smallest unit"


@pytest.fixture(scope="module")
def trace(lm):
    return lm.explain(TEXT, generate=6)


@pytest.fixture(scope="module")
def leading(trace):
    """The documents behind an answer, the largest share first."""
    return [one.doc_id for one in trace.documents(5)]


@pytest.fixture(scope="module")
def result(lm, leading):
    return what_if(lm, TEXT, leading, generate=6)


def test_what_documents_brought_is_what_the_positions_in_them_carry(
    lm, everything, leading, monkeypatch
):
    monkeypatch.setattr("prismlm.lens.cells.MOST_OF_A_RANGE", 10**6)
    cell, token, place, states, _ = everything
    trace, cells = lm.explain(TEXT, generate=6), lm.lens.cells
    number = cells.document_number(leading[0])
    sums = {}
    for method in METHODS:
        tokens, documents, values = module.parts(trace, method)
        sums[method] = np.bincount(tokens, values * (documents == number), minlength=6)
    rows = module.answer_rows(trace)
    carriers = trace.carriers()
    carried = carriers.weight[cells.document_of(carriers.place) == number].sum()
    assert sums["evidence"].sum() == pytest.approx(carried)
    assert carried > 0
    probability = cells.records(np.arange(len(cells)))["probability"].astype(float)
    for t, row in enumerate(rows):
        step, expected = trace.steps[row], 0.0
        used = [use.id for use in step.prototypes if use.evidence > 0]
        here = np.isin(cell, used) & (token == step.target_id)
        for n in np.flatnonzero(here & (cells.document_of(place) == number)):
            cosine = float(states[n] @ trace.predictions.states[row].double().numpy())
            expected += (1 - probability[n]) * math.exp((cosine - 1) / module.TEMPERATURE)
        assert sums["influence"][t] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_changes_are_those_of_a_softmax_whose_logit_loses_as_much():
    logits = torch.tensor([[2.0, 1.0, -1.0], [0.0, 3.0, 1.0]], dtype=torch.float64)
    delta = torch.tensor([0.5, 4.0], dtype=torch.float64)
    lowered = logits.clone()
    lowered[:, 0] -= delta
    before, after = (each.log_softmax(-1)[:, 0] for each in (logits, lowered))
    changes = module.changes(before.numpy(), delta.numpy())
    np.testing.assert_allclose(changes, (after - before).numpy(), atol=1e-12)


def test_an_estimate_sums_its_tokens_and_lies_in_its_interval(result, leading, trace):
    assert (result.documents, result.tokens) == (len(leading), 6)
    given = [trace[row].probability for row in module.answer_rows(trace)]
    assert result.log_probability == pytest.approx(np.log(given).sum(), abs=1e-3)
    for one in result.estimates:
        assert sum(one.tokens) == pytest.approx(one.change)
        assert one.low <= one.change <= one.high
    assert result.estimates[0].change < 0
    assert result.retrained is None
    assert not result.calibrated


def test_only_answers_like_those_of_the_calibration_are_calibrated(
    lm, leading, result, monkeypatch
):
    monkeypatch.setattr(lm.lens, "meta", replace(lm.lens.meta, trained_on="fine-tuned"))
    mean = result.log_probability / result.tokens
    cases = ((1.0, -1, 1, True), (1.0, 0.1, 1, False), (result.share / 2, -1, 1, False))
    for largest, low, high, calibrated in cases:
        ends = [mean + low, mean + high]
        stored = calibration() | {"nats_per_token": ends, "largest_share": largest}
        monkeypatch.setattr(module, "calibration", lambda stored=stored: stored)
        assert what_if(lm, TEXT, leading, generate=6).calibrated == calibrated


def test_a_token_that_is_overtaken_ends_the_text(lm, leading, monkeypatch):
    strong = {name: fit | {"scale": 1e3} for name, fit in calibration()["estimates"].items()}
    stored = calibration() | {"estimates": strong}
    monkeypatch.setattr(module, "calibration", lambda: stored)
    result = what_if(lm, TEXT, leading, generate=6)
    text = result.estimates[0].text or ""
    assert text.endswith("…")
    assert not result.answer.startswith(text[:-1])


def test_another_model_is_asked_for_the_same_answer_which_may_be_given(lm, leading):
    retrain = Mock(return_value=lm.model)
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So it is."}]
    lm.tokenizer.chat_template = TEMPLATE
    for text in (TEXT, said):
        result = what_if(lm, text, leading[:2], generate=6, retrain=retrain)
        assert sorted(retrain.call_args.args[0]) == sorted(leading[:2])
        again = result.retrained
        assert (again.change, again.tokens) == (0.0, [0.0] * result.tokens)
        assert text is said or again.text == result.answer
    assert "So it is." in result.answer


def test_groups_and_documents_are_left_out_together(lm, leading):
    cells = lm.lens.cells
    names, codes = cells.keys("source")
    whole = removed_documents(lm, [f"source={names[0]}"])
    assert np.array_equal(whole, codes == 0)
    other = cells.facts(int(np.flatnonzero(codes != 0)[0]))["doc_id"]
    assert removed_documents(lm, [f"source={names[0]}", other]).sum() == whole.sum() + 1


def test_what_cannot_be_left_out_is_refused(lm, leading, monkeypatch):
    corpus, every = lm.lens.corpus, lm.lens.cells.keys("domain").names
    held_out = corpus.doc_ids[int(corpus.split("heldout")[0])]
    for without, message in (
        (["sorce=web"], "has no document 'sorce=web'.* source=NAME"),
        ([held_out], "is held out"),
        ([f"domain={name}" for name in every], "expected some that stay"),
    ):
        with pytest.raises(InputError, match=message):
            what_if(lm, TEXT, without)
    with pytest.raises(InputError, match="wrote nothing"):
        what_if(lm, TEXT, leading, generate=0)
    with pytest.raises(InputError, match="has no lens"):
        what_if(replace(lm, lens=None), TEXT, leading)
    monkeypatch.setattr(lm.lens, "meta", replace(lm.lens.meta, trained_on=False))
    with pytest.raises(InputError, match="was not trained on the documents"):
        what_if(lm, TEXT, leading)


def test_held_out_documents_of_a_lens_of_all_are_not_left_out(tiny_model, leading, monkeypatch):
    lm = prismlm.load(tiny_model)
    lens, corpus = lm.lens, lm.lens.corpus
    gone = [lens.cells.document_number(one) for one in leading[:2]]
    splits = {"all": corpus.split("train"), "heldout": corpus.split("train")[gone]}
    monkeypatch.setattr(corpus, "split", splits.__getitem__)
    monkeypatch.setattr(lens, "meta", replace(lens.meta, split="all"))
    with pytest.raises(InputError, match=f"{leading[0]} is held out"):
        removed_documents(lm, leading[:1])
    names, codes = lens.cells.keys("source")
    same = codes == codes[gone[0]]
    expected = same.copy()
    expected[gone] = False
    source = f"source={names[codes[gone[0]]]}"
    assert np.array_equal(removed_documents(lm, [source]), expected)
