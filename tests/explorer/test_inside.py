"""Inside a model over real HTTP, against the instruments, and drawn in a browser."""

import json

import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.direction_marks import marks_shown
from prismlm.explain.attention_maps import heads_of, read_maps
from prismlm.files import json_text
from prismlm.models.uncertainty_feedback import save_uncertainty
from prismlm.pages.channels import channels_data
from prismlm.probes.channels import read_channels
from prismlm.probes.channels.report import channel_report
from prismlm.probes.uncertainty_feedback.signal import own_codes
from tests.explorer.conftest import Served, go, visited
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_model, save_with_head
from tests.helpers.running import assert_accessible, assert_fits_a_phone
from tests.helpers.small_models import attach_drawn, make_signal_noise

TEXT = "The council \u202e<b>maps</b> the river."
LEVELS = 64


@pytest.fixture(scope="module")
def served(small_corpus, tmp_path_factory):
    """The explorer of a model with channels and uncertainty feedback, without attention."""
    tokenizer = Corpus.open(small_corpus).tokenizer
    model = make_model(len(tokenizer))
    directory = save_with_head(model, tokenizer, tmp_path_factory.mktemp("mixer"))
    feedback = attach_drawn(model, LEVELS)
    with torch.no_grad():
        feedback.embedding.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    save_uncertainty(directory, feedback)
    with Served(prismlm.load(directory)) as server:
        yield server


@pytest.fixture(scope="module")
def of_heads(small_corpus, tmp_path_factory):
    """The explorer of a model of signal and noise heads."""
    tokenizer = Corpus.open(small_corpus).tokenizer
    model, directory = make_signal_noise(len(tokenizer)), tmp_path_factory.mktemp("heads")
    with Served(prismlm.load(save_with_head(model, tokenizer, directory))) as server:
        yield server


def read(page, address="inside"):
    go(page, address)
    page.fill(".x-inside .x-prompt", TEXT)
    page.click(".x-inside .x-go")


def test_channels_and_feedback_are_those_of_the_instruments(served, lm):
    parts = served.json("GET", "/api/inside")
    assert parts == {"channels": True, "attention": None, "feedback": {"levels": LEVELS}}
    data = served.json("POST", "/api/inside/channels", {"text": TEXT})
    report = channel_report(lm.model, lm.tokenizer, text=TEXT)
    assert data == json.loads(marks_shown(json_text(channels_data(lm.model, None, report))))
    fed = served.json("POST", "/api/inside/feedback", {"text": TEXT})
    ids = lm.encode(TEXT)[0]
    # Each pass makes one more position exact, so that as many as there are tokens give all.
    (codes,) = own_codes(lm.model, [ids], len(ids))
    assert len(fed["tokens"]) == len(fed["fed"]) == len(ids)
    assert fed["fed"][0] == [None, None]
    for (share, code), expected in zip(fed["fed"][1:], codes[1:].tolist(), strict=True):
        assert abs(code - expected) <= 1
        assert share == pytest.approx(code / (LEVELS - 1), rel=1e-5)
    assert len({code for _, code in fed["fed"]}) > 3


def test_channels_in_a_browser(page, lm):
    read(page)
    page.wait_for_selector(".x-fed-text")
    assert_accessible(page)
    assert page.locator(".c-layers label").count() == LAYERS + 2
    page.get_by_role("radio", name="2", exact=True).check(force=True)
    page.click('.c-item[data-channel="4"]')
    assert "Layer 2, channel 4" in page.inner_text(".c-main")
    assert "channel=2.4" in page.evaluate("location.hash")
    assert page.locator(".c-item").count() == CHANNELS
    page.get_by_role("radio", name="memory").check(force=True)
    page.locator(".c-word").last.click()
    (curves,) = read_channels(lm.model, lm.encode(TEXT)[0], [2])
    assert f"finds a mass of {float(curves.mass[-1, 4]):.2f}" in page.inner_text(".c-say")
    assert "inspect channels" in page.inner_text(".x-command")
    assert_fits_a_phone(page)
    # The address alone brings it back.
    go(page, "inside?channel=1.3")
    page.wait_for_selector("text=Layer 1, channel 3")


def test_attention_is_that_of_the_command_and_shown(of_heads, browser):
    heads, parts = of_heads.lm, of_heads.json("GET", "/api/inside")
    assert (parts["channels"], parts["feedback"]) == (False, None)
    data = of_heads.json("POST", "/api/inside/attention", {"text": TEXT, "layer": 1})
    groups = [one["group"] for one in data["maps"]]
    assert groups == ["signal"] * (len(groups) // 2) + ["noise"] * (len(groups) // 2)
    maps = read_maps(heads.model, heads.tokenizer, TEXT, heads_of(heads.model, layer=1))
    for one, own in zip(data["maps"], maps, strict=True):
        assert one["title"] == own.head.title
        for t, row in enumerate(one["weights"]):
            assert row == pytest.approx((own.weights[t, : t + 1] * 10_000).tolist(), abs=0.6)
        source, target, weight = one["strongest"][0]
        assert weight == pytest.approx(float(own.weights[source, target]), rel=1e-4)
    with visited(browser, of_heads) as page:
        read(page, "inside?head=1.2")
        page.wait_for_selector(".x-heat")
        assert_accessible(page)
        assert page.inner_text(".x-head-title") == "layer 1 · signal head 2"
        page.focus(".x-heat")
        page.keyboard.press("ArrowLeft")
        weight = data["maps"][2]["weights"][-1][-2] / 10_000
        shown = f"{100 * weight:.{int(weight < 0.1)}f} %"
        assert f"gives {shown} to" in page.inner_text(".x-heat-say")
        page.get_by_role("button", name="noise 1").click()
        assert page.inner_text(".x-head-title") == "layer 1 · noise head 1"
        assert "subtracted" in page.inner_text(".x-head-side")
        page.select_option(".x-layer select", "0")
        page.wait_for_selector("text=layer 0 · noise head 1")
        command = page.inner_text(".x-command")
        assert command.startswith("prismlm inspect attention")
        assert command.endswith("--layer 0 --head 5")
        assert_fits_a_phone(page)


def test_what_is_refused(of_heads):
    for words, path, body in (
        ("no prototype mixer", "channels", {"text": TEXT}),
        ("no uncertainty feedback", "feedback", {"text": TEXT}),
        ("no layer 99", "attention", {"text": TEXT, "layer": 99}),
        ("the explorer reads 256", "attention", {"text": "word " * 400, "layer": 0}),
    ):
        assert words in of_heads.refused("POST", f"/api/inside/{path}", body)
