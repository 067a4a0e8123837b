"""Levels of support by hand and of text that the corpus has, and the summary in words."""

from collections import defaultdict

import numpy as np
import pytest
import torch

import prismlm
from prismlm.explain.attribution import (
    MIN_WEIGHT,
    Coverage,
    Passage,
    Share,
    Sources,
    token_information,
)
from prismlm.explain.trace import summarise
from prismlm.lens.cells import UNKNOWN
from tests.helpers.token_corpus import excerpt

TOKENS, TELLING = np.array([7, 5, 7, 9]), np.array([4.0, 1.0, 4.0, 3.0])


def level_of(*carried, information=TELLING, about=None):
    pairs = np.array(carried, dtype=np.int64).reshape(-1, 2)
    return Coverage(TOKENS, information, pairs).support(about)[:2]


def test_levels_by_hand():
    # Each token counts once: 4 of the sevens, 1 of the five, 3 of the nine, 8 in all.
    assert level_of((0, 3), (1, 3), (2, 3), (3, 3), (0, 2)) == ("strong", 1)
    # Two documents share them: the one with the sevens and the five has 5 of 8.
    assert level_of((0, 3), (2, 3), (1, 3), (3, 1)) == ("weak", pytest.approx(5 / 8))
    assert level_of((1, 3), (1, 2)) == ("none", pytest.approx(1 / 8))
    assert level_of() == ("none", 0)
    assert level_of((0, 0), (0, 0), (2, 0))[1] == pytest.approx(4 / 8)
    # An answer of common words is neither strong nor none.
    for pairs in ([(0, 3), (1, 3), (2, 3), (3, 3)], []):
        assert level_of(*pairs, information=TELLING / 100)[0] == "weak"


def test_documents_that_name_nothing_of_the_question_count_one_level_less_by_hand():
    all_of, half_of = [(0, 3), (1, 3), (3, 3)], [(0, 2)]
    for pairs, about, expected in (
        (all_of, {3}, ("strong", 1)),
        (all_of, set(), ("weak", 1)),
        (half_of, set(), ("none", pytest.approx(1 / 2))),
        # One that names it and holds half is as good as one that holds all and does not.
        (all_of + half_of, {2}, ("weak", 1)),
        # Of two that hold half, one that names it is enough.
        ([*half_of, (0, 1)], {1}, ("weak", pytest.approx(1 / 2))),
        ([(1, 3)], set(), ("none", pytest.approx(1 / 8))),
    ):
        assert level_of(*pairs, about=about.__contains__) == expected


def test_a_document_carries_the_information_of_its_tokens_and_its_passages_parts_of_it(lm):
    corpus = lm.lens.corpus
    trace = lm.explain(excerpt(corpus, int(corpus.starts[3]), 24))
    told, cells = trace.attribution().coverage, lm.lens.cells
    weights = dict(zip(told.tokens.tolist(), told.weights.tolist(), strict=True))
    tokens = defaultdict(set)
    for prediction, document, _ in told.carried.tolist():
        tokens[cells.facts(document)["doc_id"]].add(int(told.tokens[prediction]))
    documents = {one.doc_id: one.carried for one in trace.documents(50)}
    for name, part in documents.items():
        expected = sum(weights[token] for token in tokens[name]) / sum(weights.values())
        assert part == pytest.approx(expected, abs=1e-12)
    assert max(documents.values()) == pytest.approx(trace.support.score)
    parts = [one.carried for one in trace.passages(50)]
    assert max(parts) > 0
    assert all(one.carried <= documents.get(one.doc_id, 1) + 1e-12 for one in trace.passages(50))
    # Of a single token a document carries all or nothing, which tells nothing.
    assert {one.carried for one in trace[5:6].documents(5)} == {None}


def test_text_of_the_corpus_is_nearer_than_noise_of_which_that_is_said_first(lm):
    corpus = lm.lens.corpus
    start = int(corpus.starts[corpus.split("train")[3]])
    known = lm.explain(excerpt(corpus, start, 32)).support
    noise = lm.explain("qzx vvk 9!~ jjw {{ %% kqz ]] xx zzq 0x7 ~~ qj")
    assert (known.level, noise.support.level) == ("strong", "none")
    assert known.score > noise.support.score
    assert noise.summary == noise.support.sentence
    assert "no document of this corpus holds what the answer tells" in noise.summary


def test_a_generated_answer_is_asked_about_without_its_prompt(lm, monkeypatch):
    # So small a model may end its text at once.
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    trace = lm.explain("The cell is", generate=5)
    answer = trace[len(trace) - 5 :]
    assert trace.written == answer.written == 5
    assert trace.support == answer.support
    for by in ("domain", "document"):
        assert trace.sources(by).items == answer.sources(by).items
    assert trace.passages(50) == answer.passages(50)
    assert trace.against(5) == answer.against(5)
    assert trace.verbatim() == answer.verbatim()
    assert trace.answer == lm.generate("The cell is", tokens=5).removeprefix("The cell is")
    assert "the answer" in trace.summary.lower() or trace.support.level == "none"
    assert trace[:0].summary is None


def test_a_token_counts_by_what_it_tells():
    found = token_information(np.exp([-2.0, -5.0, -7.0]), 10**6)
    assert found == pytest.approx([MIN_WEIGHT, MIN_WEIGHT, MIN_WEIGHT + 4])
    # What never comes next counts as half a position: in a small corpus that says little.
    telling = np.log(2e4) - 5
    assert token_information(np.zeros(1), 10**4)[0] == pytest.approx(MIN_WEIGHT + telling**2)
    assert token_information(np.zeros(1), 50) == pytest.approx([MIN_WEIGHT])


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        # Shares of the evidence and of the corpus.
        ({"law": (0.8, 0.1), "finance": (0.2, 0.9)}, ["mostly", "“law”: 80%"]),
        (
            {"finance": (0.75, 0.68), "law": (0.15, 0.058), "art": (0.1, 0.262)},
            ["more than usual", "“law”: 15%"],
        ),
        ({"finance": (0.75, 0.68), "law": (0.25, 0.32)}, ["no domain much more"]),
        # Less than half of all evidence, though most of what was traced.
        ({"law": (0.31, 0.1)}, ["Of what could be traced, the answer draws mostly", "“law”: 31%"]),
        ({UNKNOWN: (0.4, None), "art": (0.1, None)}, ["text of unknown domain: 40%"]),
        ({"law": (0.6, 1.0)}, ["60%", "this corpus."]),
        ({"law": (0.01, 0.5)}, ["Almost none"]),
    ],
)
def test_what_leads_is_named(parts, named):
    traced = sum(share for share, _ in parts.values())
    items = tuple(Share(key, *rates, traced) for key, rates in parts.items())
    shares = Sources("domain", items, 1 - traced)
    for document, leading in ((None, ""), (Passage("a/1", 0.1, *[None] * 5, 0), "“a/1”, with 10%")):
        text = summarise("the answer", shares, document, None)
        assert all(part in text for part in named)
        assert leading in text or "Almost none" in named


def test_a_head_that_does_not_fit_and_states_that_are_zero_are_said(small_model):
    lm = prismlm.load(small_model)
    assert lm.explain("The cell is").notes == []
    with torch.no_grad():
        lm.head.prototypes.mul_(50)
        wrong = lm.explain("The cell is")
        lm.model.model.norm.weight.zero_()
    zero = lm.explain("The cell is")
    no_fit = "The prototype head does not fit this model: the median"
    states = f"The hidden states of {len(zero)} of {len(zero)} predictions are zero"
    for trace, said in ((wrong, no_fit), (zero, states)):
        assert said in trace.notes[0]
        assert trace.to_dict()["notes"] == trace.notes
        assert said in trace.to_html()
    assert zero.support is None
    assert "support" not in zero.to_dict()
