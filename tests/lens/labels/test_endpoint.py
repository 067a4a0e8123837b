"""Questions to a real server on this machine, which answers well, badly or not at all."""

import re
from dataclasses import replace

import pytest

from prismlm.errors import InputError
from prismlm.lens.labels.contexts import CATEGORIES
from prismlm.lens.labels.endpoint import (
    PROMPTS,
    Endpoint,
    NoAnswer,
    Question,
    Session,
    fenced,
    prompt,
)
from prismlm.progress import SILENT
from tests.helpers.chat_server import ChatServer, completion

QUESTION = Question(({"role": "user", "content": "Which?"},), {"category": CATEGORIES})
GOOD = {"category": "Morphology"}


def questions(numbers):
    return [QUESTION._replace(messages=({"role": "user", "content": str(i)},)) for i in numbers]


@pytest.fixture
def session(tmp_path):
    """Sessions with one file of answers; without retries unless asked for."""

    def open_session(url, **settings):
        endpoint = Endpoint(url, "m", **{"retries": 0, "timeout": 5.0} | settings)
        return Session(endpoint, tmp_path / ".lens.answers.jsonl")

    return open_session


def ask_each(session, asked):
    with SILENT.task("") as task:
        return session.each(asked, session.ask, task)


def errors(status, kind):
    return status, {"error": {"message": f"something about {kind}", "type": "invalid"}}


@pytest.mark.parametrize("key", [None, "sk-secret"])
def test_an_answer_is_asked_for_once_by_schema_and_with_a_key(session, monkeypatch, key):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with ChatServer(lambda request, number: GOOD) as server:
        assert session(server.url).ask(QUESTION) == session(server.url).ask(QUESTION) == GOOD
    assert server.keys == [f"Bearer {key or 'none'}"]
    schema = server.requests[0]["response_format"]["json_schema"]
    assert schema["schema"]["properties"]["category"]["enum"] == list(CATEGORIES)
    assert schema["strict"] is True


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_server_that_refuses_a_schema_is_asked_without(session, status):
    refusal = errors(status, "response_format: no such type")
    with ChatServer(lambda request, _: refusal if "response_format" in request else GOOD) as server:
        opened = session(server.url)
        assert [opened.ask(question) for question in questions([0, 1])] == [GOOD, GOOD]
    assert ["response_format" in request for request in server.requests] == [True, False, False]
    assert server.requests[0]["temperature"] == 0
    assert server.requests[0]["max_tokens"] > 0


@pytest.mark.parametrize("answer", [errors(401, "your key"), errors(500, "\x1b[31mmemory\nx")])
def test_an_error_that_every_question_would_meet_ends_the_run(session, answer):
    with ChatServer(lambda request, number: answer) as server:
        with pytest.raises(InputError, match=r"something about .*OPENAI_API_KEY") as raised:
            session(server.url).ask(QUESTION)
        assert server.url in str(raised.value)
        assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "no JSON object with category"),
        ('{"category": "Cookery"}', "category is not one of the choices"),
        ((200, completion({"role": "assistant", "content": None})), "no JSON object"),
    ],
)
def test_an_unusable_reply_is_asked_for_once_more_and_may_be_in_a_fence(session, text, reason):
    fence = '```json\n{"category": "Morphology"}\n```'
    with ChatServer(lambda request, number: text if number % 2 == 0 else fence) as server:
        assert session(server.url).ask(QUESTION) == GOOD
        assert reason in server.requests[1]["messages"][-1]["content"]
        server.behave = lambda request, number: text
        with pytest.raises(NoAnswer, match=reason):
            session(server.url).ask(questions([0])[0])
        assert len(server.requests) == 4
        server.behave = lambda request, number: (200, "<html>login</html>")
        with pytest.raises(NoAnswer, match="no chat completion"):
            session(server.url).ask(questions([0])[0])


def test_some_failures_are_counted_and_many_end_the_run(session):
    def failing(numbers):
        bad = set(map(str, numbers))
        return lambda request, number: "?" if request["messages"][0]["content"] in bad else GOOD

    asked = questions(range(12))
    with ChatServer(failing([3, 5, 8, 9])) as server:
        opened = session(server.url, concurrency=4)
        answers = ask_each(opened, asked)
        assert [i for i in range(12) if answers[i] is None] == [3, 5, 8, 9]
        assert sum(opened.failures.values()) == 4
        assert opened.tally["requests"] == 8 + 2 * 4
        # Stored answers are not asked for again.
        server.behave, before = failing(range(12)), len(server.requests)
        assert ask_each(session(server.url), asked).count(None) == 4
        assert len(server.requests) == before + 8
    with ChatServer(failing(range(20, 40))) as server:
        with pytest.raises(InputError, match=r"of the first \d+ questions to 'm' .*kept in"):
            ask_each(session(server.url, concurrency=1), questions(range(20, 40)))
        assert 0 <= len(server.requests) - 2 * 8 <= 4


def test_a_server_that_goes_away_ends_the_run_and_keeps_its_answers(session, tmp_path):
    def behave(request, number):
        if number == 3:
            server.http.server_close()
            raise ConnectionError
        return GOOD

    with ChatServer(behave) as server:
        opened = session(server.url, concurrency=1)
        with pytest.raises(InputError, match=r"cannot be reached.*answers so far are kept"):
            ask_each(opened, questions(range(20)))
    assert len((tmp_path / ".lens.answers.jsonl").read_text().split("\n{")) == 3 + 1


def test_damaged_answers_are_asked_for_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    first, _, third = asked = questions(range(3))
    with ChatServer(lambda request, number: GOOD) as server:
        endpoint = Endpoint(server.url, "m")
        for question in asked:
            Session(endpoint, path).ask(question)
        _, one, two, three = path.read_bytes().splitlines(keepends=True)
        two = two.replace(b"Morphology", b"Cookery")
        path.write_bytes(one + two + b"\xff{[\n3\n" + three[:40])
        session = Session(endpoint, path)
        assert [session.stored(question) for question in asked] == [GOOD, None, None]
        session.ask(third)
    assert Session(endpoint, path).stored(third) == GOOD
    assert Session(replace(endpoint, model="other"), path).stored(first) is None


def test_prompts_have_every_category_and_text_cannot_leave_its_fence():
    assert set(re.findall(r'^- "(.*?)":', PROMPTS["name"], re.MULTILINE)) == set(CATEGORIES)
    text = fenced("a $name\nb")
    inside = fenced(text + "\n# again")
    assert inside.splitlines()[0] not in text
    assert inside in prompt("name", data=inside)


def test_a_bad_endpoint_is_refused():
    for settings, message in (
        ({"url": "localhost:8080"}, "expected a URL such as http"),
        ({"url": "http://host:port/v1"}, "expected a URL such as http"),
        ({"url": "http://me:secret@host/v1"}, "is 'host/v1': expected .* without a password"),
        ({"url": "http://host/v1", "timeout": 0}, "timeout is 0"),
    ):
        with pytest.raises(InputError, match=message):
            Endpoint(model="m", **settings)
