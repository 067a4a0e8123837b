import re

import pytest

from benchmarks.attribution.planted_facts import Fact, invent_facts, plant_in_documents
from benchmarks.attribution.planted_wordings import (
    STYLES,
    describe,
    described_question,
    in_other_style,
    place_facts,
)
from benchmarks.attribution.retrieval import words
from prismlm.corpus.documents import Document
from prismlm.errors import InputError

LITTLE = {"in", "is", "of", "the", "this", "to"}
SENTENCE = "This is sentence number {} of the document called {}, and it is plain prose."


def host(name):
    return Document(name, " ".join(SENTENCE.format(i, name) for i in range(5)))


@pytest.fixture(scope="module")
def facts():
    return invent_facts(8, seed=5, known=[], copies=(1, 4))


def test_a_description_is_of_one_place_alone(facts):
    found = place_facts(facts, seed=1)
    assert len(set(found)) == len(facts) == 16
    assert found == place_facts(facts, seed=1) != place_facts(facts, seed=2)
    questions = [described_question(*pair) for pair in zip(facts, found, strict=True)]
    assert f"land {found[0].direction} of the {found[0].mark} will" in questions[0]
    for fact, question in zip(facts, questions, strict=True):
        assert fact.name not in question
        assert question.endswith(f"{fact.attribute} is")


def test_a_described_fact_is_told_without_the_words_of_the_description(facts):
    found = place_facts(facts, seed=1)
    tell = describe(facts, found)
    planted = plant_in_documents(facts, [host(f"h{i}") for i in range(60)], seed=2, tell=tell)
    for item in planted:
        fact, place, text = facts[item.fact], found[item.fact], item.document.text
        passing = f"{place.direction}erly {place.mark.replace(' ', '')} land"
        assert text.count(passing) == 1
        assert passing in item.prefix
        assert text.count(fact.name) == 3
        assert text.startswith(f"{item.prefix} {fact.answer}")
        assert not {place.direction, *place.mark.split()} & set(words(text))


def test_another_style_shares_the_answer_and_little_words_alone(facts):
    planted = plant_in_documents(
        facts, [host(f"h{i}") for i in range(60)], seed=2, tell=in_other_style
    )
    for item in planted:
        fact = facts[item.fact]
        told = " ".join(in_other_style(fact, 0))
        shared = set(words(told)) & {*words(fact.prompt), fact.answer.lower()}
        assert shared - {fact.answer.lower()} <= LITTLE
        assert re.search(rf"{fact.name}ians\b", told)
        assert item.document.text.startswith(f"{item.prefix} {fact.answer}")
        assert item.document.text.count(fact.answer) >= 3


def test_every_attribute_has_its_styles(facts):
    assert {fact.attribute for fact in facts} == set(STYLES)
    first = {in_other_style(facts[0], copy)[0].split()[0] for copy in range(3)}
    assert len(first) == 3


def test_more_places_than_descriptions_are_refused():
    many = [Fact(f"N{i}", "town", "main crop", "rice", ("rice",), 1) for i in range(129)]
    with pytest.raises(InputError, match="fewer facts"):
        place_facts(many, 0)
