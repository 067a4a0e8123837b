"""Levels of support by hand, and of text that the corpus has word for word."""

from dataclasses import replace

import numpy as np
import pytest

import prismlm
from prismlm.explain.support import support_of
from prismlm.index.support import SupportScale

SCALE = SupportScale([-1.0, 0.5, 0.7, 0.9], [1, 4], [0.2, 0.4], [0.8, 0.6], [0.5, 0.05], 100)


def test_levels_by_hand():
    found = support_of(np.array([0.95, 0.95, -1.0, 0.6]), SCALE)
    assert [token.level for token in found.tokens] == ["strong", "strong", "none", "weak"]
    assert found.score == pytest.approx((0.875 + 0.875 + 0.125 + 0.375) / 4)
    places = (2 * 0.875**16 + 0.125**16 + 0.375**16) / 4
    assert found.places == pytest.approx(places)
    assert (found.low, found.high, found.high_places, found.low_words) == (0.4, 0.6, 0.05, 0)
    assert found.level == "strong"  # at places, 0.059 above 0.05, not as a whole
    assert found.words is None
    assert support_of(np.array([0.6, 0.95]), SCALE).level == "weak"
    assert support_of(np.array([-1.0]), SCALE).level == "none"
    assert support_of(np.array([0.95] * 4), SCALE).level == "strong"
    assert found.to_dict()["tokens"][2] == {"level": "none", "nearest": -1.0, "score": 0.125}


def test_words_that_stand_together_count_by_hand():
    nearest = np.array([0.6, 0.6, 0.6, 0.6])  # F = 0.375 each, below the bound of 0.4
    assert support_of(nearest, SCALE).level == "none"
    one = support_of(nearest, SCALE, np.array([0, 1, 1, 1]))
    assert (one.score, one.words, one.level) == (pytest.approx(0.375), 0.75, "none")
    two = support_of(nearest, SCALE, np.array([2, 1, 1, 1]))
    assert two.score == pytest.approx(0.375 + np.log(1.25))
    assert two.level == "weak"
    assert support_of(nearest, SCALE, np.array([4, 3, 2, 1])).level == "strong"


def test_what_is_near_but_has_no_words_of_the_corpus_is_not_in_it():
    # Of F = 0.375: as random letters, whose states are near to other strings of letters.
    nearest = np.array([0.6, 0.6, 0.6, 0.6])
    scale = replace(SCALE, low=[0.1, 0.2], high=[0.9, 0.9], low_words=[0.0, 1.5])
    few, more = np.array([2, 2, 1, 0]), np.array([2, 2, 1, 1])
    assert support_of(nearest, scale, few).words == 1.25
    assert support_of(nearest, scale, few).level == "none"
    assert support_of(nearest, scale, more).level == "weak"
    assert support_of(nearest, replace(scale, low_words=None), few).level == "weak"
    assert support_of(nearest, scale).level == "weak"  # how many words is not known
    # Half of ln 4 long: the bound is between those of 1 and 4 tokens.
    assert support_of(nearest[:2], scale, few[2:]).low_words == pytest.approx(0.75)
    # What is strong at places stays so.
    assert support_of(np.array([0.95] * 4), scale, few).level == "strong"


def test_text_of_the_corpus_is_nearer_than_noise(tiny_model):
    lm = prismlm.load(tiny_model)
    corpus = lm.lens.corpus
    start = int(corpus.starts[corpus.split("train")[3]])
    known = lm.explain(corpus.excerpt(start, 32)).support
    noise = lm.explain("qzx vvk 9!~ jjw {{ %% kqz ]] xx zzq 0x7 ~~ qj").support
    assert known.level == "strong"
    assert known.score > noise.score


def test_a_generated_answer_is_asked_about_without_its_prompt(tiny_model, monkeypatch):
    lm = prismlm.load(tiny_model)
    # So small a model may end its text at once.
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", None)
    trace = lm.explain("The cell is", generate=5)
    answer = trace[len(trace) - 5 :]
    assert trace.written == answer.written == len(trace.support.tokens) == 5
    assert trace.support == answer.support
    for by in ("domain", "document"):
        assert trace.sources(by).items == answer.sources(by).items
    assert trace.passages(50) == answer.passages(50)
    assert trace.against(5) == answer.against(5)
    assert trace.verbatim() == answer.verbatim()


def test_steps_that_were_chosen_and_texts_that_were_read_count_whole(tiny_model):
    lm = prismlm.load(tiny_model)
    trace = lm.explain("The cell is", generate=5)
    assert len(trace[:].support.tokens) == len(trace)
    assert len(trace[:2].support.tokens) == 2
    assert trace[:].sources().items != trace.sources().items
    read = lm.explain("The cell is")
    assert read.written == 0
    assert read.sources().items == read[:].sources().items
