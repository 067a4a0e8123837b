"""Themes by a language model: a real server that answers well, and one that answers rubbish."""

import pytest

from prismlm.errors import InputError
from prismlm.labels.endpoint import Endpoint
from prismlm.labels.theme_endpoint import EXPLANATION_LENGTH, EndpointJudge, theme_question
from prismlm.labels.themes import Judgement, Passage
from tests.helpers.chat_server import ChatServer

GOOD = {"theme": "tides", "disentanglement": 9, "coverage": 10, "themes": 1, "explanation": "Sea."}


def unit(number):
    words = ("The", f" tide{number}", " <<is", ">>", " high", "\n")
    return [Passage((*words, f" {i}"), (1, 4)) for i in range(10)]


@pytest.fixture
def judge(tmp_path):
    def opened(url):
        endpoint = Endpoint(url, "m", retries=0, timeout=5.0)
        return EndpointJudge(endpoint, tmp_path / ".themes.answers.jsonl")

    return opened


def test_a_unit_is_asked_about_once_with_its_marks(judge):
    with ChatServer(lambda request, number: GOOD) as server:
        first = judge(server.url)
        found = first.judge([unit(0), unit(1)])
        second = judge(server.url)
        assert second.judge([unit(0), unit(1)]) == found
        assert first.judge([unit(0)]) == [Judgement("tides", 9, 10, 1, "Sea.")]
    assert len(server.requests) == 2
    assert first.source == "endpoint:m"
    assert (first.session.asked()["requests"], second.session.asked()["requests"]) == (2, 0)
    text = server.requests[0]["messages"][0]["content"]
    # Marks of the text itself cannot be taken for ours.
    assert text.count("<< tide") == 10
    assert "‹‹is››<< high>>" in text
    assert text.count('{"passage": ') == 10
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["coverage"] == {"type": "integer"}
    assert list(schema["required"]) == list(GOOD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"coverage": 11}, {"themes": 0}, {"disentanglement": True}, {"coverage": 9.5},
        {"theme": " \n"}, {"theme": 3}, {"themes": "one"}, {"more": 1},
    ],
)  # fmt: skip
def test_rubbish_is_asked_for_again_and_then_is_no_answer(judge, wrong):
    def behave(request, number):
        return GOOD | wrong if "tide0" in request["messages"][0]["content"] else GOOD

    with ChatServer(behave) as server:
        asking = judge(server.url)
        found = asking.judge([unit(0), unit(1), unit(2)])
    assert found[0] is None
    assert [one.theme for one in found[1:]] == ["tides", "tides"]
    assert len(server.requests) == 4
    assert sum(asking.session.asked()["failures"].values()) == 1


def test_nothing_but_rubbish_ends_the_run(judge):
    with (
        ChatServer(lambda request, number: "I would rather not") as server,
        pytest.raises(InputError, match="got no answer that can be used"),
    ):
        judge(server.url).judge([unit(i) for i in range(3)])


def test_what_it_says_is_one_line_that_drives_no_terminal(judge):
    said = GOOD | {"theme": "a\x1b[31m\nb", "explanation": "x\ty" * 400}
    with ChatServer(lambda request, number: said) as server:
        (found,) = judge(server.url).judge([unit(0)])
    assert found.theme == "a [31m b"
    assert found.explanation.isprintable()
    assert len(found.explanation) <= EXPLANATION_LENGTH


def test_text_cannot_close_the_fence_that_it_stands_in():
    (message,) = theme_question(unit(0)).messages
    assert message["content"].count("</data-") == 2
