"""Answers to texts and questions over real HTTP, against `explain`, and in a browser."""

import shutil

import openai
import pytest

import prismlm
from prismlm.corpus.chat import as_chat
from prismlm.corpus.pieces import visible
from tests.explorer.conftest import (
    PROMPTS,
    QUESTIONS,
    TEXT,
    TOKEN,
    Served,
    ask,
    go,
    unfold,
    visited,
)
from tests.helpers.chats import ASKED, QUESTION, chatting
from tests.helpers.running import slowed


def test_an_answer_of_the_api_is_shown_by_its_id_whoever_wrote_it(served, lm):
    body = {"model": served.name, "prompt": "", "answer": TEXT}
    read = served.json("POST", "/api/v1/attributions", body)["id"]
    response, trace = served.write(TEXT, 6), lm.explain(TEXT, generate=6)
    key, last = response["id"], f"/steps/{len(trace) - 1}"
    for one, own in ((read, lm.explain(TEXT)), (key, trace)):
        shown = served.shown(one)
        assert (shown["id"], served.shown(one, "/asked")) == (one, {"text": TEXT, "messages": []})
        assert [step["from"] for step in shown["steps"]] == [step.target_from for step in own]
        for name in ("logit", "probability"):
            figures = [step[name] for step in shown["steps"]]
            assert figures == pytest.approx([getattr(step, name) for step in own], rel=1e-5)
    assert shown["answer"] == response["choices"][0]["text"].strip() == trace.answer.strip()
    for passages, expected in (
        (served.shown(key, last)["documents"], trace[-1:].passages(8)),
        (served.shown(key, f"{last}/against")["against"], trace[-1:].against(4)),
    ):
        shares = [passage["share"] for passage in passages]
        assert shares == pytest.approx([passage.share for passage in expected], rel=1e-4)
    status, headers, page = served.ask("GET", f"/api/answers/{key}/report.html")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert b"<title>Where the answer comes from" in page
    assert served.shown(key, "/report.json").keys() == trace.to_dict().keys()


def test_an_error_of_the_model_has_openais_form(served, lm):
    hook = lm.model.base_model.register_forward_pre_hook(lambda *_: 1 / 0)
    body = {"model": served.name, "prompt": TEXT, "max_tokens": 1}
    error = served.refused("POST", "/api/v1/completions", body, expected=500)
    hook.remove()
    assert (error["message"], error["type"]) == ("ZeroDivisionError in the server.", "server_error")


def test_answers_are_stopped_and_kept(lm):
    with slowed(lm), Served(lm, tokens=300, answers=1) as server:
        client = openai.OpenAI(base_url=f"http://{server.host}/api/v1", api_key=TOKEN)
        stream = client.completions.create(
            model=server.name, prompt=TEXT, max_tokens=400, stream=True
        )
        path = f"/api/answers/{next(stream).id}"
        assert "not finished yet" in server.refused("GET", path)
        server.json("POST", f"{path}/stop", {})
        *_, last = stream
        assert last.choices[0].finish_reason == "stop"
        assert last.prismlm["documents"]
        assert 0 < len(server.json("GET", path)["steps"]) < 300
        assert server.json("GET", f"{path}/steps/0")["documents"]
        assert server.json("POST", f"{path}/stop", {}) == {"stopped": True}
        long = server.write("word " * 160, 1)["id"]
        assert "the explorer shows 300" in server.refused("GET", f"/api/answers/{long}")
        assert "the last 1 are kept" in server.refused("GET", path)


def test_a_model_without_a_lens_says_what_is_missing_and_still_answers(
    tiny_model, tmp_path, browser
):
    copy = shutil.copytree(tiny_model, tmp_path / "bare", ignore=lambda *_: ["lens"])
    with Served(prismlm.load(copy)) as server, visited(browser, server) as page:
        (missing,) = server.json("GET", "/api/model")["missing"]
        answer = server.answer(TEXT, 2)
        assert answer["whole"] is None
        paths = ("/api/map", "/api/prototypes", "/api/prototypes/7")
        errors = [server.refused("GET", path) for path in paths]
        for words in (missing["command"], answer["support"]["sentence"], *errors):
            assert "prismlm index" in words
        ask(page, tokens=2)
        page.click(".x-column")
        page.wait_for_selector(".p-aside :text('No lens, so no training text')")


def test_the_first_view_has_prompts_and_the_shares_of_the_corpus(page, lm):
    card = page.locator(".x-try")
    assert card.all_inner_texts() == [f"medicine\n{PROMPTS['medicine']}"]
    meta = lm.lens.meta
    facts = [f"{meta.documents:,}", f"{meta.tokens:,}", "yes"]
    assert page.locator(".x-held dd").all_inner_texts() == facts
    bars = page.locator(".x-held .p-bars li").all_inner_texts()
    largest = sorted(lm.lens.cells.base_rates("domain").tolist(), reverse=True)[:12]
    percents = [float(bar.rsplit(None, 2)[1]) for bar in bars]
    assert percents == pytest.approx([100 * rate for rate in largest], abs=0.51)
    card.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".x-exports")
    assert page.input_value(".x-prompt") == PROMPTS["medicine"]


def test_columns_are_as_high_as_the_logits_and_walked_by_keyboard(page):
    ask(page)
    columns = page.locator(".x-column")
    assert columns.count() == 6
    assert page.locator(".x-answer .p-token").count() >= 12
    # Slices of a column are as high, above zero less below it, as the logit that stands below.
    heights = columns.evaluate_all(
        """columns => columns.map((column) => {
          const sum = (side) => [...column.querySelectorAll(`.${side} .x-slice`)]
            .reduce((total, slice) => total + Number(slice.style.getPropertyValue('--v')), 0);
          return [sum('x-up') - sum('x-down'), column.getAttribute('aria-label')];
        })"""
    )
    for height, label in heights:
        logit = float(label.split("logit ")[1].split(",")[0].replace("−", "-"))
        assert height == pytest.approx(logit, abs=0.02)
    # The five largest prototypes, all others as one, and the residual.
    slices = columns.nth(1).locator(".x-slice[data-prototype]")
    assert slices.count() == 5
    assert columns.nth(1).locator(".x-rest-of").count() == 1
    assert columns.nth(1).locator(".x-residual").count() == 1
    slices.first.hover()
    page.wait_for_selector(".x-hover mark")
    # From here a person walks by keyboard, and reads on.
    columns.first.click()
    assert "→" in page.inner_text(".p-title h2")
    page.focus(".x-columns")
    page.keyboard.press("ArrowRight")
    chosen = page.locator(".x-column[data-chosen]")
    assert chosen.count() == 1
    page.keyboard.press("ArrowUp")
    part = chosen.locator("[data-prototype]").first.get_attribute("data-label")
    assert page.inner_text(".x-hover b") == part
    page.keyboard.press("Escape")
    assert page.locator(".x-hover").is_hidden()
    page.click(".x-more")
    page.wait_for_selector(".p-against .p-passage mark")
    assert "--generate 6" in page.inner_text(".x-command")
    with page.expect_download() as download:
        page.click("text=PARQUET")
    assert download.value.suggested_filename == "answer.parquet"


def test_an_answer_is_opened_by_its_address_and_quotes_the_corpus(page, served, lm):
    go(page, f"ask/{served.write(TEXT, 6)['id']}")
    page.wait_for_selector(".x-exports")
    assert page.inner_text(".p-answer") == lm.explain(TEXT, generate=6).answer.strip()
    assert page.input_value(".x-prompt") == TEXT
    go(page, "ask/none")
    page.wait_for_selector(".x-problem >> text=there is no answer 'none'")
    corpus = lm.lens.corpus
    text = corpus.text(3)[: corpus.spans(3)[15, 1]]
    ask(page, text, 0)
    span = page.locator(".p-whole .p-verbatim li").first
    assert span.locator("q").inner_text().split()[0] in text
    assert span.locator("a").get_attribute("href").startswith("#/document/")
    span.locator("a").click()
    page.wait_for_selector(".x-document mark")


# -- with a chat template


@pytest.fixture(scope="module")
def chats(tiny_model, tmp_path_factory):
    lm = prismlm.load(chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model"))
    with Served(lm, tokens=64) as server:
        yield server


def test_a_question_follows_an_answer_which_is_one_message_if_it_was_continued(chats):
    lm, question = chats.lm, list(as_chat(QUESTION))
    first, trace = chats.answer(question, 4), lm.explain(question, generate=4)
    written = [step.target_id for step in trace][-4:]
    answer = lm.tokenizer.decode(written, skip_special_tokens=True)
    messages = [*question, {"role": "assistant", "content": answer}]
    assert chats.shown(first["id"], "/asked")["messages"] == messages
    messages += as_chat("Why?")
    second, trace = chats.answer(messages, 3), lm.explain(messages, generate=3)
    assert "".join(second["tokens"]).startswith(lm.as_text(messages))
    assert second["answer"] == trace.answer.strip()
    targets = [visible(step.pieces[1].label) for step in trace]
    assert [step["target"] for step in second["steps"]] == targets
    third = chats.write([*question, {"role": "assistant", "content": "The patient"}], 3)
    answer = "The patient" + third["choices"][0]["message"]["content"]
    messages = [*question, {"role": "assistant", "content": answer}]
    assert chats.shown(third["id"], "/asked")["messages"] == messages


def test_what_is_refused_without_a_template(served):
    asked, chat = {"text": QUESTION, "chat": True}, list(as_chat(QUESTION))
    whole = {"model": served.name, "messages": chat}
    for path, body in (("steer/leading", asked), ("v1/chat/completions", whole)):
        assert "has no chat template" in str(served.refused("POST", f"/api/{path}", body))


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
