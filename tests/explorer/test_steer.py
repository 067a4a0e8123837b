"""Steering over real HTTP and in a browser, against steering itself and the command it names."""

import json
import math
import re
import shlex
import shutil

import pytest
from typer.testing import CliRunner

from prismlm import Ablate, Clamp, Controller, Group, Scale
from prismlm.cli.app import app
from prismlm.direction_marks import marks_shown
from prismlm.explain.what_if import what_if
from prismlm.interventions.steering import cautions, steer, strongest
from tests.explorer.conftest import TEXT, go, visited
from tests.helpers.running import assert_accessible, assert_fits_a_phone

# What the explorer tells is rounded, and is otherwise the same to the last bit.
SIX_DIGITS = {"rel": 5e-6, "abs": 0}


@pytest.fixture(scope="module")
def served(named):
    return named


@pytest.mark.parametrize(
    ("strength", "edit"),
    [
        (0.3, lambda one: Clamp(one, 0.3)),
        (-0.29, lambda one: Scale(one, 0.71)),
        (-1, Ablate),
        (-0.5, Group(-0.5, category="Morphology")),
    ],
)
def test_a_strength_is_the_edit_of_the_library(served, lm, strength, edit):
    wanted = {"category": "Morphology"}
    if not isinstance(edit, Group):
        active = lm.explain(TEXT)[-1].prototypes[0].id
        wanted, edit = {"prototype": active}, edit(active)
    how = {"generate": 4, "temperature": 0.7, "seed": 3, "draws": 2}
    events = served.events("/api/steer", {"text": TEXT, "strength": strength, **wanted, **how})
    assert [name for name, _ in events] == ["start", *["written"] * 8, "done"]
    assert [data["tokens"] for _, data in events[1:-1]] == list(range(1, 9))
    data = events[-1][1]
    steered = steer(lm, TEXT, [edit], **how)
    assert (data["text"], data["unedited"]) == (steered.text, steered.unedited)
    for one, token in zip(data["tokens"], steered.tokens, strict=True):
        for name in ("before", "after", "control"):
            assert one[name] == pytest.approx(getattr(token, name), **SIX_DIGITS)
    for name, other in (("change", "after"), ("control", "control")):
        logs = [math.log(getattr(token, other) / token.before) for token in steered.tokens]
        assert data[name] == pytest.approx(sum(logs) / len(logs), **SIX_DIGITS)


def test_a_strength_that_is_not_given_is_found(served, lm):
    events = served.events("/api/steer", {"text": TEXT, "prototype": 7, "generate": 12, "draws": 1})
    data = events[-1][1]
    edit = strongest(lm, TEXT, Clamp(7, 1.0), generate=12)
    assert data["strength"] == pytest.approx(edit.fraction)
    steered = steer(lm, TEXT, [edit], generate=12, draws=0)
    assert (data["text"], data["cautions"]) == (steered.text, cautions(steered))


def test_what_cannot_be_done_is_refused(served):
    for words, wanted in (
        ("got none", {"strength": 0.3}),
        ("got prototype and category", {"prototype": 7, "category": "Morphology"}),
        ("no prototype 99999", {"prototype": 99999, "strength": 0.3}),
        ("no category 'Nothing'", {"category": "Nothing", "strength": 0.3}),
        ("there is no controller '../other'", {"controller": "../other"}),
        ("leave out strength", {"controller": "one", "strength": 0.3}),
        ("the explorer reads 60", {"prototype": 7, "strength": 0.3, "generate": 60}),
    ):
        assert words in served.refused("POST", "/api/steer", {"text": TEXT, **wanted})
    body = {"text": "word " * 70}
    assert "the explorer reads 60" in served.refused("POST", "/api/steer/leading", body)


def test_the_page_writes_under_a_controller(browser, served, lm):
    controller = Controller(tuple((use.id, 0.0) for use in lm.explain(TEXT)[-1].prototypes))
    folder = lm.path / "controllers"
    folder.mkdir()
    controller.save(folder / "one.safetensors")
    body = {"text": TEXT, "controller": "controllers/one.safetensors", "generate": 1, "draws": 1}
    assert served.events("/api/steer", body)[-1][1]["strength"] is None
    with visited(browser, served) as page:
        go(page, "steer")
        page.get_by_label("Prompt").fill(TEXT)
        page.get_by_label("Controller").select_option("controllers/one.safetensors")
        page.get_by_label("tokens").fill("4")
        command = page.locator(".x-command", has_text="one.safetensors --generate 4")
        assert f"--controller {lm.path}" in command.inner_text()
        page.get_by_role("button", name="Steer").click()
        page.wait_for_selector(".x-steered")
        shown = page.locator(".x-written p").all_inner_texts()
    shutil.rmtree(folder)
    expected = steer(lm, TEXT, [controller], generate=4, draws=0)
    assert expected.text != expected.unedited
    assert [text.strip() for text in shown] == [expected.text.strip(), expected.unedited.strip()]


def signed(nats):
    return f"{'−' if nats < 0 else '+'}{abs(nats):.2f}"


def test_the_page_estimates_an_answer_without_documents(page, lm):
    first = lm.explain(TEXT, generate=4).documents(1)[0]
    go(page, "steer")
    page.get_by_label("Prompt").fill(TEXT)
    page.get_by_label("tokens").fill("4")
    box = page.locator(".x-removal")
    for without in (first.doc_id, f"source={first.source}", f"license={first.license}"):
        box.get_by_label("or without").fill(without)
        box.get_by_role("button", name="Estimate").click()
        expected = what_if(lm, TEXT, [without], generate=4)
        box.get_by_text(f"Of 4 tokens, without {expected.documents} documents.").wait_for()
        now = expected.log_probability
        for row, one in zip(box.locator("tbody tr").all(), expected.estimates, strict=True):
            change = f"{signed(now)} → {signed(now + one.change)}"
            interval = f"{signed(one.low)} to {signed(one.high)}"
            assert all(words in row.inner_text() for words in (one.method, change, interval))
        assert expected.answer.strip() in box.inner_text()
    box.get_by_label("or without").fill("nowhere")
    box.get_by_role("button", name="Estimate").click()
    assert "has no document 'nowhere'" in box.get_by_role("alert").inner_text()
    assert_fits_a_phone(page)


def test_what_the_next_token_relies_on_is_that_of_explain_and_offered(page, served, lm):
    data, step = served.json("POST", "/api/steer/leading", {"text": TEXT}), lm.explain(TEXT)[-1]
    assert data["probability"] == pytest.approx(step.probability, **SIX_DIGITS)
    parts = [step.residual, step.bias, *(use.contribution for use in step.prototypes)]
    raised = sum(max(0, part) for part in parts)
    names = [marks_shown(use.name) for use in step.prototypes[:5]]
    for one, use, name in zip(data["prototypes"], step.prototypes[:5], names, strict=True):
        assert (one["id"], one["name"]) == (use.id, name)
        assert one["share"] == pytest.approx(use.contribution / raised, **SIX_DIGITS)
    go(page, "steer")
    offered, first = page.locator(".x-lead"), step.prototypes[0].id
    offered.first.wait_for()
    page.get_by_label("Prompt").fill(TEXT)
    page.get_by_label("Prompt").blur()
    shown = [f".x-lead:nth-of-type({i}):has-text('{name}')" for i, name in enumerate(names, 1)]
    page.wait_for_selector(":root:has({})".format("):has(".join(shown)))
    assert_accessible(page)
    button = page.get_by_role("button", name="Steer")
    assert button.is_disabled()
    offered.first.click()
    page.wait_for_url(re.compile(rf"prototype={first}&strength=-100"))
    assert offered.first.get_attribute("aria-pressed") == "true"
    assert f"--prototype {first} --edit ablate" in page.inner_text(".x-command")
    # What is offered stays where it is until the next comes: this click leaves the prompt.
    page.get_by_label("Prompt").fill("The council")
    button.click()
    page.wait_for_selector(".x-steered:has-text('The council')")


def test_the_page_shows_what_its_command_gives(page):
    go(page, "steer")
    page.wait_for_selector(".x-command:has-text('--prototype ID --generate 20')")
    go(page, "steer?prototype=5&strength=-40")
    page.locator(".x-chosen", has_text="word5 → next5").wait_for()
    page.get_by_label("Prompt").fill("- the court's 'order'")
    picking = page.get_by_role("combobox", name="Prototype")
    picking.fill("word117")
    page.get_by_role("option").first.wait_for()
    picking.press("ArrowDown")
    picking.press("Enter")
    page.wait_for_url(re.compile("prototype=117&strength=-40"))
    page.get_by_label("strength").press("End")
    page.wait_for_url(re.compile("strength=100"))
    page.get_by_label("strength").press("PageDown")
    page.get_by_label("tokens").fill("3")
    page.get_by_role("button", name="Steer").click()
    rows = page.locator(".x-table tbody tr")
    rows.first.wait_for()
    command = shlex.split(page.locator(".x-command").inner_text())
    assert command[0] == "prismlm"
    result = CliRunner().invoke(app, [command[1], "--json", *command[2:]])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert value["edit"] == {"kind": "clamp", "prototype": 117, "fraction": 0.8}
    texts = page.locator(".x-written")
    assert texts.first.inner_text().endswith(value["text"])
    assert rows.count() == len(value["tokens"]) == 3
    for row, token in zip(rows.all(), value["tokens"], strict=True):
        shown = re.search(r"→ (<?)([\d.]+) %", row.inner_text())
        assert float(shown[2]) == pytest.approx(100 * token["after"], abs=0.51)
    assert_fits_a_phone(page)
