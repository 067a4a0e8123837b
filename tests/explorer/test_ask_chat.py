"""Questions to a model that has a chat template, over real HTTP and in a real browser."""

import json

import pytest

import prismlm
from prismlm.corpus.chat import as_chat
from prismlm.corpus.pieces import visible
from prismlm.corpus.read import DocumentReader
from prismlm.web.server import Answer
from tests.explorer.conftest import QUESTIONS, Served, texts_of, unfold, visited
from tests.helpers.chats import ASKED, CHAT, QUESTION, SHARED, chatting


@pytest.fixture(scope="module")
def lm(tiny_model, tmp_path_factory):
    return prismlm.load(chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def chats(lm):
    with Served(lm, tokens=64) as server:
        yield server


def test_a_model_says_whether_it_can_be_asked(chats, served):
    # The stars are no domain of the lens.
    own = {"medicine": QUESTIONS["medicine"]}
    for server, chat, questions in ((chats, True, own), (served, False, {})):
        told = server.json("GET", "/api/model")
        assert (told["chat"], told["questions"]) == (chat, questions)


def test_a_question_is_asked_by_the_template(chats, lm):
    shown = chats.answer(as_chat(QUESTION), 4)
    trace = lm.explain(as_chat(QUESTION), generate=4)
    assert "".join(shown["tokens"]).startswith(ASKED)
    assert [step["target"] for step in shown["steps"]] == [
        visible(step.pieces[1].label) for step in trace
    ]
    sentence = trace.support.sentence
    assert shown["support"] == {"level": trace.support.level, "sentence": sentence}
    assert shown["answer"] == trace.answer.strip()


def test_a_question_follows_an_answer(chats, lm, tmp_path):
    first = chats.answer(as_chat(QUESTION), 4)
    written = [step.target_id for step in lm.explain(as_chat(QUESTION), generate=4)][-4:]
    answer = lm.tokenizer.decode(written, skip_special_tokens=True)
    said = [*as_chat(QUESTION), {"role": "assistant", "content": answer}]
    assert chats.json("GET", f"/api/answers/{first['id']}/asked")["messages"] == said
    said += as_chat("Why?")
    done = chats.answer(said, 3)
    assert "".join(done["tokens"]).startswith(lm.as_text(said))
    saved = chats.ask("GET", f"/api/answers/{done['id']}/chat.jsonl")[2]
    assert json.loads(saved) == {"messages": said}
    # It is a file that `prismlm explain --file` reads, to write the same.
    (tmp_path / "chat.jsonl").write_bytes(saved)
    (read,) = DocumentReader(tmp_path / "chat.jsonl", tokenizer=lm.tokenizer)
    trace = lm.explain(read.messages, generate=3)
    assert [step["target"] for step in done["steps"]] == [
        visible(step.pieces[1].label) for step in trace
    ]


def test_a_question_follows_what_was_said_with_its_marks(chats):
    said = as_chat("What is\u200f this?")
    key = chats.write(said, 3)["id"]
    told = chats.json("GET", f"/api/answers/{key}/asked")
    assert told["text"] == "What is\u200f this?"
    assert told["messages"][:-1] == said


def test_an_empty_answer_stands_between_questions(lm):
    messages = Answer(as_chat(QUESTION), "", lm.explain(QUESTION)).messages
    assert [one["role"] for one in messages] == ["user", "assistant"]


def test_a_question_follows_an_answer_that_the_model_continued(chats):
    begun = [*as_chat(QUESTION), {"role": "assistant", "content": "The patient"}]
    done = chats.write(begun, 3)
    answer = "The patient" + done["choices"][0]["message"]["content"]
    messages = chats.json("GET", f"/api/answers/{done['id']}/asked")["messages"]
    assert messages == [*as_chat(QUESTION), {"role": "assistant", "content": answer}]


def test_a_text_has_no_messages_to_save(chats):
    text = chats.write(QUESTION, 2)["id"]
    assert "has no messages" in chats.refused("GET", f"/api/answers/{text}/chat.jsonl")


def test_a_model_without_a_template_refuses_questions(served):
    path, body = "/api/steer/leading", {"text": QUESTION, "chat": True}
    assert "has no chat template" in served.refused("POST", path, body)
    put = {"model": served.name, "messages": list(as_chat(QUESTION))}
    said = served.refused("POST", "/api/v1/chat/completions", put)
    assert "has no chat template" in said["message"]


def test_an_answer_is_steered(chats):
    asked_ = {"text": QUESTION, "chat": True}
    told = chats.json("POST", "/api/steer/leading", asked_)
    wanted = {"prototype": told["prototypes"][0]["id"], "strength": -1, "generate": 3, "draws": 1}
    done = chats.events("/api/steer", asked_ | wanted)[-1][1]
    assert done["prompt"] == ASKED
    # The template's marks stand in it once.
    assert done["text"].startswith(ASKED)
    assert done["text"].count("<user>") == done["unedited"].count("<user>") == 1
    plain = chats.json("POST", "/api/steer/leading", {"text": QUESTION})
    assert plain["probability"] != told["probability"]


def test_a_chat_that_ends_with_a_question_is_left_out_of_an_audit_and_said(chats):
    texts = [{"id": "answered", "messages": CHAT}, {"id": "asked", "messages": CHAT[:-1]}]
    events = chats.events("/api/audits", texts_of(texts))
    (start,) = (data for name, data in events if name == "start")
    assert start["texts"] == 1
    assert events[-1][1]["summary"]["left_out"] == {"chat without an answer": 1}
    assert [data["text_id"] for name, data in events if name == "row"] == ["answered"]


def test_files_of_chats_are_audited(chats):
    def sent(row):
        return {"files": [{"name": "a.jsonl", "content": json.dumps(row)}]}

    for row in ({"id": "chat", "messages": CHAT}, {"id": "shared", "conversations": SHARED}):
        events = chats.events("/api/audits", sent(row))
        (told,) = [data for name, data in events if name == "row"]
        assert (told["text_id"], told["opening"]) == (row["id"], QUESTION)
    said = "a.jsonl:1: number 0 is {'role': 'user'}, expected a record with role and content"
    assert said in chats.refused("POST", "/api/audits", sent({"messages": [{"role": "user"}]}))


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
        assert "--file chat.jsonl --generate 4" in page.inner_text(".x-command")
        with page.expect_download() as saved:
            page.click(".x-exports a:has-text('Chat')")
        assert [one["role"] for one in json.loads(saved.value.path().read_text())["messages"]] == [
            "user",
            "assistant",
            "user",
        ]
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
