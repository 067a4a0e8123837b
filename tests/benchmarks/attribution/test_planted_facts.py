"""Invented facts in documents: as stated, described without a name, and in another style."""

import re

import pytest

from benchmarks.attribution.planted_facts import (
    STYLES,
    WORDINGS,
    describe,
    described_question,
    in_other_style,
    invent_facts,
    place_facts,
    plant_in_documents,
)
from benchmarks.attribution.retrieval import words
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out

LITTLE = {"in", "is", "of", "the", "this", "to"}
SENTENCE = "This is sentence number {} of the document called {}, and it is plain prose."
HOSTS = [
    Document(f"h{n}", " ".join(SENTENCE.format(i, f"h{n}") for i in range(6)), domain="law")
    for n in range(60)
]


@pytest.fixture(scope="module")
def facts():
    return invent_facts(8, seed=5, known=[], copies=(1, 4))


def test_every_fact_is_in_its_documents_and_opens_each_in_another_wording():
    facts = invent_facts(2, seed=3, known=["nothing known"], copies=(1, 4, 16))
    planted = plant_in_documents(facts, HOSTS, seed=3)
    assert [fact.copies for fact in facts] == [1, 1, 4, 4, 16, 16]
    assert len({item.document.doc_id for item in planted}) == len(planted) == 42
    for number, fact in enumerate(facts):
        own = [item for item in planted if item.fact == number]
        texts = [item.document.text for item in own]
        assert len(own) == fact.copies
        assert all(text.count(fact.name) == 3 for text in texts)
        assert not any(is_held_out(item.document.doc_id, 0.05) for item in own)
        others = [other.name for other in facts if other is not fact]
        assert not any(name in text for name in others for text in texts)
        assert all(i.document.text.startswith(f"{i.prefix} {fact.answer}.") for i in own)
        opening = {
            next(w for w in WORDINGS if text.split("plain prose. ")[1].startswith(fact.state(w)))
            for text in texts
        }
        assert len(opening) == fact.copies
        # The question is in no document.
        assert not any(" ".join(fact.prompt.split()[-6:]) in text for text in texts)
        assert fact.answer in fact.candidates


def test_a_seed_decides_everything_and_known_words_are_no_names():
    def build(seed):
        return plant_in_documents(invent_facts(1, seed, known=[]), HOSTS, seed)

    assert build(1) == build(1)
    texts, others = ({item.document.text for item in build(seed)} for seed in (1, 2))
    assert texts.isdisjoint(others)
    names = [fact.name for fact in invent_facts(3, 0, known=[], copies=(1,))]
    again = invent_facts(3, 0, known=[f"A text of {names[1].upper()}."], copies=(1,))
    assert names[1] not in [fact.name for fact in again]


def test_a_described_fact_is_told_without_the_words_of_its_question(facts):
    found = place_facts(facts, seed=1)
    assert len(set(found)) == len(facts) == 16
    tell = describe(facts, found)
    for item in plant_in_documents(facts, HOSTS, seed=2, tell=tell):
        fact, place, text = facts[item.fact], found[item.fact], item.document.text
        question = described_question(fact, place)
        assert f"land {place.direction} of the {place.mark} will" in question
        assert fact.name not in question
        passing = f"{place.direction}erly {place.mark.replace(' ', '')} land"
        assert text.count(passing) == item.prefix.count(passing) == 1
        assert text.count(fact.name) == 3
        assert text.startswith(f"{item.prefix} {fact.answer}")
        assert not {place.direction, *place.mark.split()} & set(words(text))


def test_another_style_shares_the_answer_and_little_words_alone(facts):
    assert {fact.attribute for fact in facts} == set(STYLES)
    assert len({in_other_style(facts[0], copy)[0].split()[0] for copy in range(3)}) == 3
    for item in plant_in_documents(facts, HOSTS, seed=2, tell=in_other_style):
        fact, text = facts[item.fact], item.document.text
        told = " ".join(in_other_style(fact, 0))
        assert set(words(told)) & set(words(fact.prompt)) - {fact.answer.lower()} <= LITTLE
        assert re.search(rf"{fact.name}ians\b", told)
        assert text.startswith(f"{item.prefix} {fact.answer}")
        assert text.count(fact.answer) >= 3
