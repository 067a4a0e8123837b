"""Answers to texts over real HTTP, against `explain`, and asked for in a browser."""

import shutil

import openai
import pytest

import prismlm
from tests.explorer.conftest import TEXT, TOKEN, Served, ask, go, visited
from tests.helpers.running import slowed


def test_an_answer_of_the_api_is_shown_by_its_id(served, lm):
    response = served.write(TEXT, 6)
    trace, key = lm.explain(TEXT, generate=6), response["id"]
    shown = served.json("GET", f"/api/answers/{key}")
    question = served.json("GET", f"/api/answers/{key}/asked")
    assert (shown["id"], question) == (key, {"text": TEXT, "messages": []})
    assert shown["answer"] == response["choices"][0]["text"].strip() == trace.answer.strip()
    probabilities = [step["probability"] for step in shown["steps"]]
    assert probabilities == pytest.approx([step.probability for step in trace], rel=1e-4)
    path = f"/api/answers/{key}/steps/{len(trace) - 1}"
    shares = [passage.share for passage in trace[-1:].passages(8)]
    documents = served.json("GET", path)["documents"]
    assert [document["share"] for document in documents] == pytest.approx(shares, rel=1e-4)
    opposing = served.json("GET", f"{path}/against")["against"]
    shares = [p.share for p in trace[-1:].against(4)]
    assert [p["share"] for p in opposing] == pytest.approx(shares, rel=1e-4)
    status, headers, page = served.ask("GET", f"/api/answers/{key}/report.html")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert b"<title>Where the answer comes from" in page
    assert served.json("GET", f"/api/answers/{key}/report.json").keys() == trace.to_dict().keys()


def test_an_answer_by_others_is_shown_too(served, lm):
    body = {"model": served.name, "prompt": "", "answer": TEXT}
    key = served.json("POST", "/api/v1/attributions", body)["id"]
    shown, trace = served.json("GET", f"/api/answers/{key}"), lm.explain(TEXT)
    logits = [step["logit"] for step in shown["steps"]]
    assert logits == pytest.approx([step.logit for step in trace], rel=1e-5)
    assert not any(step["from"] == "generated" for step in shown["steps"])
    assert served.json("GET", f"/api/answers/{key}/asked")["text"] == TEXT


def test_answers_are_stopped_and_kept(lm):
    with slowed(lm), Served(lm, tokens=300, answers=1) as server:
        client = openai.OpenAI(base_url=f"http://{server.host}/api/v1", api_key=TOKEN)
        stream = client.completions.create(
            model=server.name, prompt=TEXT, max_tokens=400, stream=True
        )
        key = next(stream).id
        assert "not finished yet" in server.refused("GET", f"/api/answers/{key}")
        server.json("POST", f"/api/answers/{key}/stop", {})
        *_, last = stream
        assert last.choices[0].finish_reason == "stop"
        assert last.prismlm["documents"]
        assert 0 < len(server.json("GET", f"/api/answers/{key}")["steps"]) < 300
        assert server.json("GET", f"/api/answers/{key}/steps/0")["documents"]
        assert server.json("POST", f"/api/answers/{key}/stop", {}) == {"stopped": True}
        long = server.write("word " * 160, 1)["id"]
        assert "the explorer shows 300" in server.refused("GET", f"/api/answers/{long}")
        assert "the last 1 are kept" in server.refused("GET", f"/api/answers/{key}")


def test_a_model_without_a_lens_says_what_is_missing_and_still_answers(
    tiny_model, tmp_path, browser
):
    copy = shutil.copytree(tiny_model, tmp_path / "bare", ignore=lambda *_: ["lens"])
    with Served(prismlm.load(copy)) as server:
        (missing,) = server.json("GET", "/api/model")["missing"]
        assert "prismlm index" in missing["command"]
        answer = server.answer(TEXT, 2)
        assert "prismlm index" in answer["support"]["sentence"]
        assert answer["whole"] is None
        for path in ("/api/map", "/api/prototypes", "/api/prototypes/7"):
            assert "prismlm index" in server.refused("GET", path)
        with visited(browser, server) as page:
            ask(page, tokens=2)
            page.click(".x-column")
            page.wait_for_selector(".p-aside :text('No lens, so no training text')")


def test_the_first_view_has_prompts_and_the_shares_of_the_corpus(page, lm):
    card = page.locator(".x-try")
    assert card.all_inner_texts() == ["medicine\nThe symptoms of this disease in patients include"]
    meta = lm.lens.meta
    facts = [f"{meta.documents:,}", f"{meta.tokens:,}", "yes"]
    assert page.locator(".x-held dd").all_inner_texts() == facts
    rates = lm.lens.cells.base_rates("domain")
    bars = [bar.rsplit(None, 2) for bar in page.locator(".x-held .p-bars li").all_inner_texts()]
    percents = [float(bar[1]) for bar in bars]
    largest = sorted(rates.tolist(), reverse=True)[:12]
    assert percents == pytest.approx([100 * rate for rate in largest], abs=0.51)
    card.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".x-exports")
    assert page.input_value(".x-prompt").startswith("The symptoms of")


def test_an_answer_is_opened_by_its_address_whoever_asked(page, served, lm):
    key = served.write(TEXT, 6)["id"]
    go(page, f"ask/{key}")
    page.wait_for_selector(".x-exports")
    assert page.inner_text(".p-answer") == lm.explain(TEXT, generate=6).answer.strip()
    assert page.input_value(".x-prompt") == TEXT
    go(page, "ask/none")
    page.wait_for_selector(".x-problem >> text=there is no answer 'none'")


def test_columns_are_as_high_as_the_logits_and_walked_by_keyboard(page):
    ask(page)
    assert page.locator(".x-column").count() == 6
    assert page.locator(".x-answer .p-token").count() >= 12
    # Slices of a column are as high, above zero less below it, as the logit that stands below.
    heights = page.evaluate(
        """() => [...document.querySelectorAll('.x-column')].map((column) => {
          const sum = (side) => [...column.querySelectorAll(`.${side} .x-slice`)]
            .reduce((total, slice) => total + Number(slice.style.getPropertyValue('--v')), 0);
          return [sum('x-up') - sum('x-down'), column.getAttribute('aria-label')];
        })"""
    )
    for height, label in heights:
        logit = float(label.split("logit ")[1].split(",")[0].replace("−", "-"))
        assert height == pytest.approx(logit, abs=0.02)
    # The five largest prototypes, all others as one, and the residual.
    column = page.locator(".x-column").nth(1)
    assert column.locator(".x-slice[data-prototype]").count() == 5
    assert column.locator(".x-rest-of").count() == column.locator(".x-residual").count() == 1
    column.locator(".x-slice[data-prototype]").first.hover()
    page.wait_for_selector(".x-hover mark")
    # From here a person walks by keyboard, and reads on.
    page.click(".x-column")
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


def test_words_of_the_corpus_stand_below_the_passages(page, lm):
    corpus = lm.lens.corpus
    text = corpus.text(3)[: corpus.spans(3)[15, 1]]
    ask(page, text, 0)
    span = page.locator(".p-whole .p-verbatim li")
    assert span.locator("q").first.inner_text().split()[0] in text
    link = span.locator("a").first
    assert link.get_attribute("href").startswith("#/document/")
    link.click()
    page.wait_for_selector(".x-document mark")
