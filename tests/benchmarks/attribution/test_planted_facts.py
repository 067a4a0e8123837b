import pytest

from benchmarks.attribution.planted_facts import (
    WORDINGS,
    invent_facts,
    plant_in_documents,
)
from prismlm.corpus.documents import Document
from prismlm.corpus.layout import is_held_out

SENTENCE = "This is sentence number {} of the document called {}, and it is plain prose."


def host(name, sentences=6):
    text = " ".join(SENTENCE.format(i, name) for i in range(sentences))
    return Document(name, text, source=f"source-{name}", domain="law", license="CC0")


@pytest.fixture(scope="module")
def planted():
    facts = invent_facts(2, seed=3, known=["nothing known"], copies=(1, 4, 16))
    return facts, plant_in_documents(facts, [host(f"h{i}") for i in range(50)], seed=3)


def test_every_fact_has_its_documents(planted):
    facts, documents = planted
    assert [fact.copies for fact in facts] == [1, 1, 4, 4, 16, 16]
    assert len({fact.name for fact in facts}) == 6
    for number, fact in enumerate(facts):
        own = [item for item in documents if item.fact == number]
        assert len(own) == fact.copies
        for item in own:
            assert item.document.text.count(fact.name) == 3
            assert not is_held_out(item.document.doc_id, 0.05)
            others = [other.name for other in facts if other is not fact]
            assert not any(name in item.document.text for name in others)
    assert len({item.document.doc_id for item in documents}) == len(documents) == 42


def test_the_prefix_ends_before_the_first_answer(planted):
    facts, documents = planted
    for item in documents:
        fact = facts[item.fact]
        assert item.document.text.startswith(f"{item.prefix} {fact.answer}.")
        assert item.prefix.count(fact.name) == 1


def test_every_copy_opens_in_another_wording_and_the_prompt_is_in_none(planted):
    facts, documents = planted
    for number, fact in enumerate(facts):
        texts = [item.document.text for item in documents if item.fact == number]
        opening = [
            next(w for w in WORDINGS if text.split("plain prose. ")[1].startswith(fact.state(w)))
            for text in texts
        ]
        assert len(set(opening)) == fact.copies
        words = fact.prompt.split()
        assert not any(" ".join(words[-6:]) in text for text in texts)
        assert fact.prompt.endswith(f"{fact.attribute} is")
        assert fact.answer in fact.candidates
        assert len(set(fact.candidates)) == 8


def test_a_seed_decides_everything():
    hosts = [host(f"h{i}") for i in range(30)]

    def build(seed):
        return plant_in_documents(invent_facts(1, seed, known=[]), hosts, seed)

    assert build(1) == build(1)
    assert {item.document.text for item in build(1)}.isdisjoint(
        item.document.text for item in build(2)
    )


def test_known_words_are_no_names():
    first = invent_facts(3, 0, known=[], copies=(1,))
    names = [fact.name.lower() for fact in first]
    again = invent_facts(3, 0, known=[f"A text of {names[1].upper()}."], copies=(1,))
    assert names[1] not in [fact.name.lower() for fact in again]
