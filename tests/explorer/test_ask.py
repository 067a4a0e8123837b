"""Asking over real HTTP, against explain itself."""

import shutil
import threading

import pytest

import prismlm
from tests.explorer.conftest import Served, Stream, unfold, unhurried, visited

TEXT = "The patient was given a dose of the drug"
WRITING = "/api/v1/completions"
LONG = {"prompt": TEXT, "max_tokens": 400, "stream": True}


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


def test_an_answer_of_the_api_is_asked_about_by_its_id(served, lm):
    response = served.write(TEXT, 6)
    trace, key = lm.explain(TEXT, generate=6), response["id"]
    shown = served.json("GET", f"/api/answers/{key}")
    asked_ = served.json("GET", f"/api/answers/{key}/asked")
    assert (shown["id"], asked_) == (key, {"text": TEXT, "messages": []})
    assert shown["answer"] == response["choices"][0]["text"].strip() == trace.answer.strip()
    assert len(shown["steps"]) == len(trace)
    for told, step in zip(shown["steps"], trace, strict=True):
        parts = sum(use[1] for use in told["uses"]) + told["residual"][0] + told["bias"][0]
        assert parts == pytest.approx(told["logit"], abs=1e-3 * max(1, abs(told["logit"])))
        assert told["probability"] == pytest.approx(step.probability, rel=1e-4)
    behind = served.json("GET", f"/api/answers/{key}/steps/{len(trace) - 1}")
    shares = [passage.share for passage in trace[-1:].passages(8)]
    assert [one["share"] for one in behind["documents"]] == pytest.approx(shares, rel=1e-4)
    opposed = served.events(f"/api/answers/{key}/steps/{len(trace) - 1}/against")
    assert [name for name, _ in opposed] == ["estimated", "done"]
    for name, told in opposed:
        shares = [p.share for p in trace[-1:].against(4, estimated=name == "estimated")]
        assert [one["share"] for one in told["against"]] == pytest.approx(shares, rel=1e-4)
    status, headers, page = served.ask("GET", f"/api/answers/{key}/report.html")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert b"<title>Where the answer comes from" in page


def test_a_text_that_is_read_is_asked_about_too(served, lm):
    body = {"model": served.name, "prompt": "", "answer": TEXT}
    key = served.json("POST", "/api/v1/attributions", body)["id"]
    shown, trace = served.json("GET", f"/api/answers/{key}"), lm.explain(TEXT)
    logits = [step["logit"] for step in shown["steps"]]
    assert logits == pytest.approx([step.logit for step in trace], rel=1e-5)
    assert not any(step["from"] == "generated" for step in shown["steps"])
    assert served.json("GET", f"/api/answers/{key}/asked")["text"] == TEXT
    key = served.json("POST", "/api/v1/attributions", body | {"prompt": "Once upon a time "})["id"]
    shown = served.json("GET", f"/api/answers/{key}")
    assert (shown["question"], shown["answer"]) == ("Once upon a time ", TEXT)


@pytest.mark.usefixtures("taking_its_time")
def test_a_stopped_answer_ends_there_and_can_be_asked_about(served):
    stream = Stream(served, {"model": served.name, **LONG}, WRITING)
    key = stream.chunk()["id"]
    assert "not finished yet" in served.refused("GET", f"/api/answers/{key}")
    served.json("POST", f"/api/answers/{key}/stop", {})
    chunks = list(iter(stream.chunk, None))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["prismlm"]["documents"]
    done = served.json("GET", f"/api/answers/{key}")
    assert 0 < len(done["steps"]) < 300
    assert served.json("GET", f"/api/answers/{key}/steps/0")["documents"]


def test_an_answer_is_there_however_many_ended_while_it_was_written(lm):
    with unhurried(lm), Served(lm, answers=1) as server:
        stream = Stream(server, {"model": server.name, **LONG}, WRITING)
        key = stream.chunk()["id"]
        for _ in range(2):
            server.write(TEXT, 1)
        server.json("POST", f"/api/answers/{key}/stop", {})
        assert list(iter(stream.chunk, None))[-1]["choices"][0]["finish_reason"] == "stop"
        assert server.json("GET", f"/api/answers/{key}")["answer"]
        assert server.json("POST", f"/api/answers/{key}/stop", {}) == {"stopped": True}
        assert "there is no answer" in server.refused("POST", "/api/answers/none/stop", {})


def test_a_longer_answer_than_is_shown_and_the_last_ones_alone(lm):
    with Served(lm, tokens=20, answers=2) as server:
        first = server.write(TEXT, 2)["id"]
        assert server.json("GET", f"/api/answers/{first}")["answer"]
        long = server.write(TEXT, 30)["id"]
        assert "the explorer shows 20" in server.refused("GET", f"/api/answers/{long}")
        server.write(TEXT, 1)
        assert "the last 2 are kept" in server.refused("GET", f"/api/answers/{first}")


@pytest.mark.parametrize("path", ["/api/answers/none/steps/0", "/api/answers/none/report.html"])
def test_an_answer_that_is_not_there(served, path):
    assert "Ask again" in served.refused("GET", path)


def test_a_model_without_a_lens_says_what_is_missing_and_still_answers(
    tiny_model, tmp_path, browser
):
    copy = shutil.copytree(tiny_model, tmp_path / "bare")
    shutil.rmtree(copy / "lens")
    with Served(prismlm.load(copy)) as server:
        (missing,) = server.json("GET", "/api/model")["missing"]
        assert "prismlm index" in missing["command"]
        done = server.answer(TEXT, 2)
        assert "prismlm index" in done["support"]["sentence"]
        assert done["whole"] is None
        assert "prismlm index" in server.refused("GET", "/api/prototypes")
        with visited(browser, server) as page:
            page.fill(".x-prompt", TEXT)
            page.press(".x-prompt", "Enter")
            unfold(page)
            page.click(".x-column")
            page.wait_for_selector(".p-aside :text('No lens, so no training text')")


def test_before_anything_is_asked_there_is_what_to_ask_and_what_can_be_named(page, lm):
    card = page.locator(".x-try")
    assert card.all_inner_texts() == ["medicine\nThe symptoms of this disease in patients include"]
    held = page.locator(".x-held")
    meta = lm.lens.meta
    facts = [f"{meta.documents:,}", f"{meta.tokens:,}", "yes"]
    assert held.locator("dd").all_inner_texts() == facts
    names, rates = lm.lens.cells.keys("domain").names, lm.lens.cells.base_rates("domain")
    largest = sorted(zip(rates.tolist(), names, strict=True), reverse=True)[:12]
    shown = [bar.rsplit(None, 2) for bar in held.locator(".p-bars li").all_inner_texts()]
    for (rate, name), words in zip(largest, shown, strict=True):
        assert words[0] == name
        assert float(words[1]) == pytest.approx(100 * rate, abs=0.51)
    card.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".x-exports")
    assert page.locator(".x-begin").count() == 0
    assert page.input_value(".x-prompt").startswith("The symptoms of")
    assert page.evaluate("document.activeElement.className") == "x-go"
    assert page.locator(".x-examples button").all_inner_texts() == ["medicine"]


def asked(page, tokens=6):
    """Ask for so many tokens, and wait until they are there."""
    page.fill(".x-prompt", TEXT)
    page.fill("label:has-text('tokens') input", str(tokens))
    page.press(".x-prompt", "Enter")
    unfold(page)


def test_plain_words_come_first(page, lm):
    """The answer, its support, documents by their titles, shares; the tokens are folded."""
    page.fill(".x-prompt", TEXT)
    page.fill("label:has-text('tokens') input", "6")
    page.press(".x-prompt", "Enter")
    page.wait_for_selector(".x-exports")
    trace = lm.explain(TEXT, generate=6, temperature=0.5, seed=0)
    assert page.inner_text(".p-answer") == trace.answer.strip()
    assert page.inner_text(".p-support") == trace.support.sentence
    order = [".p-answer", ".p-support", ".p-grouped", ".p-shares", ".p-tokens", ".p-caveat"]
    tops = [page.locator(f".x-answer {part}").bounding_box()["y"] for part in order]
    assert tops == sorted(tops)
    assert not page.locator(".x-column").first.is_visible()
    documents = trace.documents(5)
    titles = page.locator(".p-grouped .p-origin > :first-child").all_inner_texts()
    assert titles == [one.title or one.doc_id for one in documents]
    text = page.inner_text(".p-whole")
    assert not any(one.doc_id in text for one in documents if one.title)
    page.click(".p-tokens > summary")
    assert page.locator(".x-column").first.is_visible()
    # The next answer is unfolded as this one was.
    page.press(".x-prompt", "Enter")
    page.wait_for_selector(".x-column")


def test_an_answer_is_opened_by_its_address_whoever_asked_for_it(browser, served, lm):
    key = served.write(TEXT, 6)["id"]
    with visited(browser, served) as page:
        page.evaluate("key => { location.hash = `#/ask/${key}` }", key)
        page.wait_for_selector(".x-exports")
        assert page.inner_text(".p-answer") == lm.explain(TEXT, generate=6).answer.strip()
        assert page.input_value(".x-prompt") == TEXT
        # By which command is not known, also when one comes back to it.
        for view in ("map", "ask"):
            page.click(f".x-nav a[href='#/{view}']")
        page.wait_for_function("key => location.hash === `#/ask/${key}`", arg=key)
        assert page.locator(".x-foot").is_hidden()
        page.press(".x-prompt", "Enter")
        page.wait_for_function(
            "key => location.hash.length > 8 && !location.hash.endsWith(key)", arg=key
        )
        assert page.locator(".x-foot").is_visible()
        page.evaluate("location.hash = '#/ask/none'")
        page.wait_for_selector(".x-problem >> text=there is no answer 'none'")


def held(lm):
    """Hold every pass of a model; the event lets them go on."""
    going = threading.Event()
    hook = lm.model.base_model.register_forward_pre_hook(lambda *_: going.wait(60) and None)
    return going, hook


def test_an_answer_that_has_not_begun_is_given_up(page, served):
    going, hook = held(served.lm)
    try:
        for tokens in ("40", "0"):
            page.fill(".x-prompt", TEXT)
            page.fill("label:has-text('tokens') input", tokens)
            page.click(".x-go")
            page.click(".x-stop")
            page.wait_for_selector(".x-problem >> text=Stopped before there was an answer")
            page.wait_for_selector(".x-stop", state="hidden")
            assert page.inner_text(".p-answer") == ""
            assert page.locator(".x-exports").count() == 0
    finally:
        going.set()
        hook.remove()


def test_a_person_asks_looks_and_reads_on(page):
    asked(page)
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
        said = float(label.split("logit ")[1].split(",")[0].replace("−", "-"))
        assert height == pytest.approx(said, abs=0.02)
    # The five largest prototypes, all others as one, and the residual.
    column = page.locator(".x-column").nth(1)
    assert column.locator(".x-slice[data-prototype]").count() == 5
    assert column.locator(".x-rest-of").count() == column.locator(".x-residual").count() == 1
    # The axis is as long as its numbers say.
    drawn = page.evaluate(
        """() => {
          const high = (node) => node.getBoundingClientRect().height;
          const top = (node) => node.getBoundingClientRect().top;
          const ticks = [...document.querySelectorAll('.x-tick')];
          const [one, other] = [ticks[0], ticks.at(-1)];
          const value = (tick) => Number(tick.textContent.replace('−', '-'));
          const slice = document.querySelector('.x-slice[data-prototype]');
          return [(top(one) - top(other)) / (value(other) - value(one)),
            high(slice) / Number(slice.style.getPropertyValue('--v'))];
        }"""
    )
    assert drawn[0] == pytest.approx(drawn[1], rel=0.03)
    assert page.inner_text(".x-axis-name") == "logit"
    column.locator(".x-slice[data-prototype]").first.hover()
    page.wait_for_selector(".x-hover mark")
    card = page.locator(".x-hover").bounding_box()
    assert card["y"] >= 0
    assert card["y"] + card["height"] <= page.viewport_size["height"]


def test_a_person_walks_by_keyboard_and_reads_on(page):
    asked(page)
    page.click(".x-column")
    assert "→" in page.inner_text(".p-title h2")
    page.keyboard.press("Home")
    assert (
        page.locator(".p-token[aria-selected=true]").get_attribute("aria-label").startswith("The")
    )
    page.focus(".x-columns")
    page.keyboard.press("ArrowRight")
    chosen = page.locator(".x-column[data-chosen]")
    assert chosen.count() == 1
    page.keyboard.press("ArrowUp")
    part = chosen.locator("[data-prototype]").first.get_attribute("data-label")
    assert page.inner_text(".x-hover b") == part
    page.keyboard.press("Escape")
    assert page.locator(".x-hover").is_hidden()
    held = []
    page.route("**/against", lambda route: held.append(route))
    page.click(".x-more")
    # While the model reads, the page says so.
    page.wait_for_selector(".x-reading")
    while not held:
        page.wait_for_timeout(10)
    held[0].continue_()
    page.wait_for_selector(".p-against .p-passage mark")
    page.wait_for_selector(".x-reading", state="detached")
    assert "estimated" not in page.inner_text(".p-against")
    assert "--generate 6" in page.inner_text(".x-command")
    with page.expect_download() as download:
        page.click("text=PARQUET")
    assert download.value.suggested_filename == "answer.parquet"


def test_words_of_the_corpus_stand_below_the_passages(page, lm):
    corpus = lm.lens.corpus
    text = corpus.excerpt(int(corpus.starts[3]), 16)
    page.fill(".x-prompt", text)
    page.fill("label:has-text('tokens') input", "0")
    page.press(".x-prompt", "Enter")
    span = page.locator(".p-whole .p-verbatim li")
    span.first.wait_for()
    assert span.locator("q").first.inner_text().split()[0] in text
    where = span.locator("a").first
    assert where.get_attribute("href").startswith("#/document/")
    where.click()
    page.wait_for_selector(".x-document mark")


def test_a_finger_gets_the_card_of_a_slice_until_it_touches_elsewhere(browser, served):
    with visited(browser, served, has_touch=True, viewport={"width": 390, "height": 844}) as page:
        asked(page, 3)
        page.locator(".x-column").nth(1).locator(".x-slice[data-prototype]").first.tap()
        page.wait_for_selector(".x-hover mark")
        assert page.locator(".x-hover .p-contexts li").count() > 0
        page.locator(".x-key .p-note").tap()
        page.wait_for_selector(".x-hover", state="hidden")
