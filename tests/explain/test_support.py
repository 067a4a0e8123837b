"""Levels of support by hand, and of text that the corpus has word for word."""

import numpy as np
import pytest

from prismlm.explain.attribution import MIN_WEIGHT, Coverage, token_information
from tests.helpers.token_corpus import excerpt

TOKENS, TELLING = np.array([7, 5, 7, 9]), np.array([4.0, 1.0, 4.0, 3.0])


def level_of(*carried):
    pairs = np.array(carried, dtype=np.int64).reshape(-1, 2)
    return Coverage(TOKENS, TELLING, pairs).support()


def test_levels_by_hand():
    # Each token counts once: 4 of the sevens, 1 of the five, 3 of the nine, 8 in all.
    one = level_of((0, 3), (1, 3), (2, 3), (3, 3), (0, 2))
    assert (one.score, one.level) == (1, "strong")
    # Two documents share them: the one with the sevens and the five has 5 of 8.
    parts = level_of((0, 3), (2, 3), (1, 3), (3, 1))
    assert (parts.score, parts.level) == (pytest.approx(5 / 8), "weak")
    few = level_of((1, 3), (1, 2))
    assert (few.score, few.level) == (pytest.approx(1 / 8), "none")
    assert (level_of().score, level_of().level) == (0, "none")
    assert (level_of((0, 0), (0, 0), (2, 0)).score) == pytest.approx(4 / 8)


def test_an_answer_of_common_words_is_neither_strong_nor_none():
    for pairs in ([(0, 3), (1, 3), (2, 3), (3, 3)], []):
        carried = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        assert Coverage(TOKENS, TELLING / 100, carried).support().level == "weak"


def test_text_of_the_corpus_is_nearer_than_noise(lm):
    corpus = lm.lens.corpus
    start = int(corpus.starts[corpus.split("train")[3]])
    known = lm.explain(excerpt(corpus, start, 32)).support
    noise = lm.explain("qzx vvk 9!~ jjw {{ %% kqz ]] xx zzq 0x7 ~~ qj").support
    assert known.level == "strong"
    assert known.score > noise.score


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


def test_a_token_counts_by_what_it_tells():
    rates = np.exp([-2.0, -5.0, -7.0])
    found = token_information(rates, 10**6)
    assert found == pytest.approx([MIN_WEIGHT, MIN_WEIGHT, MIN_WEIGHT + 4])
    # What never comes next counts as half a position: in a small corpus that says little.
    telling = np.log(2e4) - 5
    assert token_information(np.zeros(1), 10**4)[0] == pytest.approx(MIN_WEIGHT + telling**2)
    assert token_information(np.zeros(1), 50) == pytest.approx([MIN_WEIGHT])
