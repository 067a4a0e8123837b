"""Questions to a model that has a chat template, over real HTTP and in a real browser."""

import pytest

import prismlm
from prismlm.corpus.chat import as_chat
from prismlm.corpus.pieces import visible
from tests.explorer.conftest import QUESTIONS, Served, unfold, visited
from tests.helpers.chats import ASKED, QUESTION, chatting


@pytest.fixture(scope="module")
def lm(tiny_model, tmp_path_factory):
    return prismlm.load(chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def chats(lm):
    with Served(lm, tokens=64) as server:
        yield server


def targets(trace):
    return [visible(step.pieces[1].label) for step in trace]


def test_a_question_follows_an_answer(chats, lm):
    first = chats.answer(as_chat(QUESTION), 4)
    written = [step.target_id for step in lm.explain(as_chat(QUESTION), generate=4)][-4:]
    answer = lm.tokenizer.decode(written, skip_special_tokens=True)
    messages = [*as_chat(QUESTION), {"role": "assistant", "content": answer}]
    assert chats.json("GET", f"/api/answers/{first['id']}/asked")["messages"] == messages
    messages += as_chat("Why?")
    second = chats.answer(messages, 3)
    assert "".join(second["tokens"]).startswith(lm.as_text(messages))
    assert second["answer"] == lm.explain(messages, generate=3).answer.strip()
    trace = lm.explain(messages, generate=3)
    assert [step["target"] for step in second["steps"]] == targets(trace)


def test_an_answer_that_the_model_continued_is_one_message(chats):
    begun = [*as_chat(QUESTION), {"role": "assistant", "content": "The patient"}]
    response = chats.write(begun, 3)
    answer = "The patient" + response["choices"][0]["message"]["content"]
    messages = chats.json("GET", f"/api/answers/{response['id']}/asked")["messages"]
    assert messages == [*as_chat(QUESTION), {"role": "assistant", "content": answer}]


def test_what_is_refused_without_a_template(served):
    path, body = "/api/steer/leading", {"text": QUESTION, "chat": True}
    assert "has no chat template" in served.refused("POST", path, body)
    body = {"model": served.name, "messages": list(as_chat(QUESTION))}
    error = served.refused("POST", "/api/v1/chat/completions", body)
    assert "has no chat template" in error["message"]


def test_an_answer_is_steered(chats):
    question = {"text": QUESTION, "chat": True}
    leading = chats.json("POST", "/api/steer/leading", question)
    edit = {"prototype": leading["prototypes"][0]["id"], "strength": -1, "generate": 3, "draws": 1}
    data = chats.events("/api/steer", question | edit)[-1][1]
    assert data["prompt"] == ASKED
    # The template's marks stand in it once.
    assert data["text"].startswith(ASKED)
    assert data["text"].count("<user>") == data["unedited"].count("<user>") == 1
    plain = chats.json("POST", "/api/steer/leading", {"text": QUESTION})
    assert plain["probability"] != leading["probability"]


def test_a_person_asks_a_question(browser, chats):
    with visited(browser, chats) as page:
        box = page.get_by_label("as a question")
        assert box.is_checked()
        assert page.locator(".x-try").all_inner_texts() == [f"medicine\n{QUESTIONS['medicine']}"]
        page.fill("label:has-text('tokens') input", "4")
        page.click(".x-try")
        unfold(page)
        assert page.inner_text(".x-answer .p-text").startswith("<user>")
        assert "--chat --generate 4" in page.inner_text(".x-command")
        page.fill(".x-prompt", "Why?")
        page.click("button:has-text('Follow up')")
        page.wait_for_selector(".x-answer .p-text:has-text('Why?')")
        page.wait_for_selector(".x-exports")
        assert QUESTIONS["medicine"] in page.inner_text(".x-answer .p-text")
        assert page.locator(".x-foot").is_hidden()
        page.fill(".x-prompt", QUESTION)
        page.press(".x-prompt", "Enter")
        page.wait_for_selector(f".x-answer .p-text:has-text('{QUESTION}')")
        assert "Why?" not in page.inner_text(".x-answer .p-text")
        box.uncheck()
        assert page.locator("button:has-text('Follow up')").count() == 0
        assert "--chat" not in page.inner_text(".x-command")
        page.click(".x-example")
        page.wait_for_selector(".x-answer .p-text:has-text('The symptoms')")
        assert not page.inner_text(".x-answer .p-text").startswith("<user>")
