import numpy as np
import pytest

from benchmarks.attribution.smollm2_corpus import short_host
from benchmarks.attribution.smollm2_judges import compared, known_facts
from prismlm.corpus.documents import Document

SHORT = "This sentence has more than forty characters."


def test_hosts_are_short_sentences_alone():
    long = "A sentence that goes on and on, " + "and on " * 10 + "until it ends."
    text = f"{SHORT} {long} Too short. {SHORT} {SHORT} Is this a question, and long enough? {SHORT}"
    host = short_host(Document("a", text, source="s"))
    assert host is not None
    assert host.text == " ".join([SHORT] * 4)
    assert host.source == "s"
    assert short_host(Document("a", f"{SHORT} {long} {SHORT} {SHORT}")) is None


def test_facts_that_are_known_are_chosen_of_every_level():
    facts = [{"copies": copies} for copies in (1, 1, 1, 4, 4, 4)]
    assert known_facts(facts, [1, 2, 1, 1, 1, 1], 2) == [0, 2, 3, 4]


def test_what_explain_has_more_is_told_with_the_error_of_the_difference():
    explained = np.array([[1.0, 0.5], [3.0, 0.5]])
    found = compared(np.array([[0.0, 0.0], [2.0, 1.0]]), explained)
    assert found["gain"]["mean"] == 1
    assert found["gain behind"] == pytest.approx({"mean": 1, "error": 0})
    assert found["specific behind"] == pytest.approx({"mean": 0, "error": 0.5})
