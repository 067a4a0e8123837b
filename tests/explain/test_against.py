"""What speaks against predictions, beside a loop over every position of the corpus."""

import math
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import prismlm
from prismlm.corpus import document_windows
from prismlm.errors import InputError
from prismlm.explain import against as module
from prismlm.explain.attribution import TEMPERATURE
from prismlm.lens.cells import UNKNOWN

TEXTS = ["The cell is the smallest unit", "Once upon a time there was a"]
EVERYTHING = 10**9


@pytest.fixture(scope="module")
def probabilities(lm):
    """The model's probabilities of what is predicted, by place and token, window by window."""
    wanted = sorted({step.target_id for text in TEXTS for step in lm.explain(text, generate=4)})
    corpus, meta, found = lm.lens.corpus, lm.lens.meta, {}
    documents = corpus.split(meta.split), corpus.starts, corpus.lengths
    grid = document_windows(*documents, meta.window, meta.stride)
    for start, length, skip in np.stack([grid.start, grid.length, grid.skip], 1).tolist():
        ids = torch.from_numpy(corpus.read_tokens(start, length).astype(np.int64))[None]
        with torch.no_grad():
            rows = lm.model(input_ids=ids).logits[0].softmax(-1)[skip:, wanted].tolist()
        for place, row in enumerate(rows, start + skip):
            found[place] = dict(zip(wanted, row, strict=True))
    return found


def naive(lm, text, steps, everything, probabilities):
    """Return the weight of every place straight from the equation."""
    cell, token, place, states, _ = everything
    trace = lm.explain(text, generate=4)[steps]
    found = {}
    for step, row in zip(trace, range(len(trace)), strict=True):
        used = [use.id for use in step.prototypes]
        rows = np.flatnonzero(np.isin(cell, used) & (token != step.target_id))
        cosines = states[rows] @ trace.predictions[list(trace.rows)].states[row].double().numpy()
        for n, cosine in zip(place[rows].tolist(), cosines.tolist(), strict=True):
            p = probabilities[n][step.target_id]
            found[n] = found.get(n, 0.0) + p * math.exp((cosine - 1) / TEMPERATURE)
    return found


def read_again(lm, rivals):
    """Return candidates with the model's own probabilities."""
    corpus = lm.lens.text_source
    p = module.probabilities_at(lm, lm.lens, corpus, rivals.place, rivals.token)
    return rivals._replace(probability=p)


STEPS = [(TEXTS[1], slice(2, 5)), (TEXTS[0], slice(None))]


@pytest.mark.parametrize(("text", "steps"), STEPS)
def test_weights_are_the_equations(lm, everything, probabilities, text, steps, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPARED", EVERYTHING)
    monkeypatch.setattr(module, "CANDIDATES", EVERYTHING)
    expected = naive(lm, text, steps, everything, probabilities)
    trace = lm.explain(text, generate=4)[steps]
    # Of all passages, which have all been read, shares sum to 1.
    assert sum(p.share for p in trace.against(EVERYTHING)) == pytest.approx(1)
    rivals = read_again(lm, module.candidates(trace.predictions[list(trace.rows)], lm, lm.lens))
    places, number = np.unique(rivals.place, return_inverse=True)
    got = dict(zip(places.tolist(), np.bincount(number, rivals.weight).tolist(), strict=True))
    assert len(expected) > 50
    assert got == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(("text", "steps"), STEPS)
def test_few_passages_are_read_and_they_are_those_that_reading_all_puts_first(
    tiny_model, text, steps, monkeypatch
):
    lm, reader = prismlm.load(tiny_model), Mock(wraps=module.probabilities_at)
    monkeypatch.setattr(module, "probabilities_at", reader)
    trace = lm.explain(text, generate=4)[steps]
    shown, whole = trace.against(5), trace.against(EVERYTHING)
    few, every = (len(call.args[3]) for call in reader.call_args_list)
    assert 5 <= few < every / 10
    assert len(shown) == 5
    best = {(p.position, p.predicted) for p in whole[:5]}
    assert sum((p.position, p.predicted) in best for p in shown) >= 4
    by_position = {p.position: p for p in whole}
    for passage in shown:  # not the estimate
        assert passage.probability == pytest.approx(by_position[passage.position].probability)


def test_passages_say_what_came_next_and_what_was_predicted_and_a_filter_keeps_their_shares(lm):
    trace = lm.explain(TEXTS[0])
    passages, targets = trace.against(EVERYTHING), {step.target for step in trace}
    for passage in passages[:5]:
        entry = passage.to_dict()
        assert entry["for_or_against"] == "against"
        assert entry["predicted"] in targets - {passage.around.token}
        assert 0 < entry["probability"] < 1
    license = passages[0].license or UNKNOWN
    kept = trace.against(EVERYTHING, where={"license": license})
    expected = [p for p in passages if (p.license or UNKNOWN) == license]
    assert [(p.position, p.share) for p in kept] == [(p.position, p.share) for p in expected]


def test_a_corpus_that_is_missing_is_said(small_model):
    lm = prismlm.load(small_model)
    lm.lens.meta = replace(lm.lens.meta, corpus_path="/nowhere", with_text=False)
    with pytest.raises(InputError, match="is not where it was"):
        lm.explain(TEXTS[0]).against()


def test_estimates_are_near_the_models_own(lm, monkeypatch):
    trace = lm.explain(TEXTS[1], generate=8)
    every = module.candidates(trace.predictions, lm, lm.lens)
    monkeypatch.setattr(module, "CANDIDATES", 100)
    some = module.candidates(trace.predictions, lm, lm.lens)
    assert len(every.place) > len(some.place) == 100
    true = read_again(lm, some).weight
    assert true.max() > 0.01
    # int8 codes are near enough for estimates that are near.
    np.testing.assert_allclose(some.weight, true, atol=0.02)
    pairs = [set(zip(one.place.tolist(), one.token.tolist(), strict=True)) for one in (some, every)]
    assert pairs[0] < pairs[1]
