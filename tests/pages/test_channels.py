"""The page holds the gates it shows, lets no text become markup, and works in a browser."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from prismlm.corpus import build_corpus
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.outputs import write_text
from prismlm.pages.channels import channel_page, channels_data
from prismlm.probes.channels import read_channels
from prismlm.probes.channels.report import channel_report
from tests.helpers.begun import begun_tokenizer, texts
from tests.helpers.html_reader import Reader
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model

EVIL = "</script><script>document.title='hurt'</script><img src=x onerror=alert(1)>"
TEXT = f"Maps of 日本 and the Fuß. {EVIL}"

# Whether the chosen channel is in the visible part of the list.
IN_LIST = """() => {
  const box = (css) => document.querySelector(css).getBoundingClientRect();
  const list = box(".c-list"), item = box(".c-item[aria-selected=true]");
  return item.top >= list.top && item.bottom <= list.bottom;
}"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    rows = [
        {
            "text": f"The {thing} of 日本 carries {EVIL} to the {thing}, don't forget. " * 3,
            "title": f"{EVIL}{number}",
            "url": "javascript:alert(1)" if number % 2 else "https://example.org/a",
        }
        for number, thing in enumerate(["river", "council", "maps", "winter"] * 6)
    ]
    source = directory / "documents.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_corpus(source, directory / "corpus", vocab_size=300)


@pytest.fixture(scope="module")
def model(corpus):
    return make_model(len(corpus.tokenizer))


@pytest.fixture(scope="module")
def report(corpus, model):
    return channel_report(
        model, corpus.tokenizer, Sequences(corpus, "all", 48), text=TEXT, name=EVIL
    )


@pytest.fixture(scope="module")
def page(corpus, model, report):
    return channel_page(report, model, corpus)


def stored(data, layer, channel):
    """Yield each text with its write gates, read gates and decays; None for a constant decay."""
    shown, shared = data["layers"][layer]["channels"][channel], data["layers"][layer]["shared"]
    for (number, _), gates in zip(shown["texts"], shown["gates"], strict=True):
        write, read = (
            np.array(gates["write" if shared else kind]) / 1000 * most
            for kind, most in zip(("write", "read"), shown["largest"], strict=True)
        )
        text = data["texts"][number]
        assert len(write) == sum(text["many"].get(i, 1) for i in range(len(text["words"])))
        yield text, write, read, gates.get("decay")


def test_the_stored_gates_are_those_of_each_sequence_alone(corpus, model, report):
    data = channels_data(model, corpus, report)
    assert [len(layer["channels"]) for layer in data["layers"]] == [CHANNELS] * LAYERS
    for layer in range(LAYERS):
        for k, channel in enumerate(report.layers[layer].channels):
            texts = list(stored(data, layer, k))
            assert len(texts) == 1 + len(channel["sequences"])
            assert "".join(texts[0][0]["words"]) == TEXT
            ids = [list(report.text.token_ids)]
            for sequence, (text, *_) in zip(channel["sequences"], texts[1:], strict=True):
                assert "".join(text["words"]) == corpus.excerpt(
                    sequence["position"], sequence["length"]
                )
                ids.append(corpus.read_tokens(sequence["position"], sequence["length"]).tolist())
            largest = data["layers"][layer]["channels"][k]["largest"]
            for one, (_, write, read, _) in zip(ids, texts, strict=True):
                (curves,) = read_channels(model, torch.tensor(one), [layer])
                for kept, gate, most in zip(
                    (write, read), (curves.write, curves.read), largest, strict=True
                ):
                    expected = gate[:, k].numpy()
                    assert np.abs(kept - expected).max() <= 0.00051 * most


def test_gates_after_what_a_tokenizer_puts_first_are_those_that_were_read(tmp_path):
    tokenizer = begun_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    pq.write_table(pa.Table.from_pylist(texts(2)), tmp_path / "texts.parquet")
    corpus = build_corpus(
        tmp_path / "texts.parquet", tmp_path / "corpus", tokenizer=tmp_path / "tokenizer"
    )
    for settings in ({}, {"decay_mode": "token"}):
        model, sequences = make_model(len(tokenizer), **settings), Sequences(corpus, "all", 16)
        report = channel_report(model, tokenizer, sequences)
        data = channels_data(model, corpus, report)
        for layer in range(LAYERS):
            for k, channel in enumerate(report.layers[layer].channels):
                largest = data["layers"][layer]["channels"][k]["largest"][0]
                assert any(passage.offset for passage in report.passages.values())
                gates = stored(data, layer, k)
                for sequence, (_, write, *_) in zip(channel["sequences"], gates, strict=True):
                    assert len(write) == sequence["length"]
                    assert largest == pytest.approx(
                        max(t["gate"] for s in channel["sequences"] for t in s["tokens"]), rel=1e-5
                    )
                    for token in sequence["tokens"]:
                        gate = write[token["position"] - sequence["position"]]
                        assert abs(gate - token["gate"]) <= 0.00051 * largest


def test_decays_by_token_are_stored_for_every_position(corpus):
    by_token = make_model(len(corpus.tokenizer), decay_mode="token")
    sequences = Sequences(corpus, "all", 48)
    report = channel_report(by_token, corpus.tokenizer, sequences, text=TEXT)
    data = channels_data(by_token, corpus, report)
    for layer in range(LAYERS):
        for k, channel in enumerate(report.layers[layer].channels):
            assert data["layers"][layer]["channels"][k]["halfLife"] is None
            ids = [list(report.text.token_ids)]
            ids += [
                corpus.read_tokens(s["position"], s["length"]).tolist()
                for s in channel["sequences"]
            ]
            gates = list(stored(data, layer, k))
            for one, (_, gate, _, decay) in zip(ids, gates, strict=True):
                (curves,) = read_channels(by_token, torch.tensor(one), [layer])
                expected = curves.decay[:, k].double().numpy()
                np.testing.assert_allclose(np.log(decay), np.log(expected), rtol=0.001)
                # As the page's script does it.
                i = len(one) - 1
                left = np.cumprod(decay[:i][::-1])[::-1] * gate[:i]
                weights = curves.memory(k)[i].numpy()
                np.testing.assert_allclose(left / left.sum(), weights[:i], atol=0.003)
    assert "NaN" not in json.dumps(data, allow_nan=False)


def test_nothing_in_a_text_or_corpus_becomes_markup(page):
    reader = Reader(page)
    assert len(reader.blocks) == len(reader.scripts) == 1
    assert page.count("<script") == page.count("</script") == 2
    assert [tag for tag, _ in reader.elements if tag in ("img", "a", "iframe", "link")] == []
    assert not [a for _, a in reader.elements if "src" in a or "href" in a or "onerror" in a]
    # What was escaped is still there to be read, and no part of a character is.
    (data,) = reader.blocks
    assert EVIL in "".join(data["texts"][0]["words"])
    assert "\ufffd" not in page


def test_a_page_of_a_text_alone_and_what_has_none(corpus, model, tmp_path):
    alone = channel_report(model, corpus.tokenizer, text="The river.")
    write_text(tmp_path / "page.html", channel_page(alone, model, None))
    (data,) = Reader((tmp_path / "page.html").read_text(encoding="utf-8")).blocks
    assert len(data["texts"]) == 1
    assert data["documents"] == []
    with pytest.raises(InputError, match="needs a corpus or a text"):
        channel_page(channel_report(model, corpus.tokenizer), model, None)
    llama = make_llama(len(corpus.tokenizer))
    heads = channel_report(llama, corpus.tokenizer, Sequences(corpus, "all", 48), name="llama")
    with pytest.raises(InputError, match="llama has no channels"):
        channel_page(heads, llama, corpus)


def assert_finds(words, chosen, text, memory):
    """What the chosen word finds: the figures of the library."""
    weights = memory[sum(text.counts[: chosen + 1]) - 1]
    shares = [0.0] * len(text.words)
    for place, word in enumerate(text.word_of):
        shares[word] += weights[place].item()
    labels = [words.nth(i).get_attribute("aria-label") for i in range(len(text.words))]
    for label, share in zip(labels, shares, strict=True):
        match = re.search(r"memory (<1|\d+) %", label)
        assert match, label
        assert abs(float(match[1].strip("<")) / 100 - share) < 0.02
    strength = [
        float(words.nth(i).evaluate("n => n.style.getPropertyValue('--a')"))
        for i in range(chosen + 2)
    ]
    assert strength[: chosen + 1] == pytest.approx(
        [s / max(shares) for s in shares[: chosen + 1]], abs=0.03
    )
    assert strength[chosen + 1] == 0


def test_in_a_browser(opened, page, report):
    with opened(page) as tab:
        assert tab.title() == f"What the channels carry: {EVIL}"
        assert "Layer 0, channel 0" in tab.inner_text(".c-main")

        tab.get_by_role("radio", name="2", exact=True).check(force=True)
        tab.click('.c-item[data-channel="4"]')
        shown = tab.inner_text(".c-main")
        channel = report.layers[2].channels[4]
        assert "Layer 2, channel 4" in shown
        assert f"{channel['repetition']:.2f}" in shown
        assert tab.evaluate("location.hash") == "#l2c4"
        assert tab.locator(".c-texts > li").count() == 1 + len(channel["sequences"])
        assert "日" in shown
        assert EVIL.split(">")[1] in shown

        words = tab.locator(".c-texts > li").first.locator(".c-word")
        tab.get_by_role("radio", name="memory").check(force=True)
        chosen = 6
        words.nth(chosen).click()
        assert_finds(words, chosen, report.text.text, report.text.curves[2].memory(4))

        # By keys alone: the next word, and the next channel.
        tab.keyboard.press("ArrowRight")
        assert words.nth(chosen + 1).get_attribute("aria-selected") == "true"
        assert words.nth(chosen + 1).evaluate("n => n === document.activeElement")
        tab.focus('.c-item[aria-selected="true"]')
        tab.keyboard.press("ArrowDown")
        assert "Layer 2, channel 5" in tab.inner_text(".c-main")
        assert tab.evaluate("document.activeElement.dataset.channel") == "5"

        # An address shows its channel in the list, too.
        tab.add_style_tag(content=".c-list { max-height: 300px } .c-item { height: 100px }")
        for channel in (5, 0):
            tab.evaluate("channel => { location.hash = `#l1c${channel}` }", channel)
            tab.wait_for_selector(f"text=Layer 1, channel {channel}")
            assert tab.evaluate(IN_LIST)

        tab.emulate_media(color_scheme="dark")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 18, 22)"
