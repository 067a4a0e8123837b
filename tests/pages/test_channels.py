"""The page holds the gates it shows, lets no text become markup, and works in a browser."""

from __future__ import annotations

import json
import re
from itertools import product

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
from tests.helpers.token_corpus import excerpt

EVIL = "</script><script>document.title='hurt'</script><img src=x onerror=alert(1)>"
TEXT = f"Maps of 日本 and the Fuß. {EVIL}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    rows = [
        {
            "text": f"The {thing} of 日本 carries {EVIL} to the {thing}, don't forget. " * 3,
            "title": f"{EVIL}{number}",
            "url": "javascript:alert(1)" if number % 2 else "https://example.org/a",
        }
        for number, thing in enumerate(["river", "council", "maps", "winter"] * 2)
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


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A corpus whose tokenizer puts tokens before a text."""
    directory, tokenizer = tmp_path_factory.mktemp("begun"), begun_tokenizer()
    tokenizer.save_pretrained(directory / "tokenizer")
    pq.write_table(pa.Table.from_pylist(texts(2)), directory / "texts.parquet")
    return build_corpus(
        directory / "texts.parquet", directory / "corpus", tokenizer=directory / "tokenizer"
    )


@pytest.mark.parametrize(
    ("source", "length", "decay_mode"), [("corpus", 48, "channel"), ("begun", 16, "token")]
)
def test_gates_are_those_of_each_text_alone(request, source, length, decay_mode):
    corpus = request.getfixturevalue(source)
    model = make_model(len(corpus.tokenizer), decay_mode=decay_mode)
    report = channel_report(
        model, corpus.tokenizer, Sequences(corpus, "all", length), text=TEXT, name=EVIL
    )
    assert any(passage.offset for passage in report.passages.values()) or source == "corpus"
    data = channels_data(model, corpus, report)
    assert "NaN" not in json.dumps(data, allow_nan=False)
    assert [len(layer["channels"]) for layer in data["layers"]] == [CHANNELS] * LAYERS
    read = {}
    for start, passage in report.passages.items():
        prefix = corpus.prefix if passage.offset else []
        ids = [*prefix, *corpus.read_tokens(start, len(passage.text.tokens)).tolist()]
        read[start] = read_channels(model, torch.tensor(ids)), len(prefix)
    for layer, k in product(range(LAYERS), range(CHANNELS)):
        channel, shown = report.layers[layer].channels[k], data["layers"][layer]["channels"][k]
        expected = [(report.text.curves, 0), *(read[s["position"]] for s in channel["sequences"])]
        kept = list(stored(data, layer, k))
        assert "".join(kept[0][0]["words"]) == TEXT
        for (_, write, read_gates, decay), (curves, skipped) in zip(kept, expected, strict=True):
            own, most = curves[layer], shown["largest"]
            for found, gates, largest in (
                (write, own.write, most[0]),
                (read_gates, own.read, most[1]),
            ):
                error = np.abs(found - gates[skipped:, k].numpy())
                assert error.max() <= 0.00051 * largest
            assert (decay is None) == (decay_mode == "channel") == (shown["halfLife"] is not None)
            if decay is not None:
                logs = own.decay[skipped:, k].double().log()
                np.testing.assert_allclose(np.log(decay), logs, rtol=0.002)
        for sequence, (text, write, *_) in zip(channel["sequences"], kept[1:], strict=True):
            assert "".join(text["words"]) == excerpt(
                corpus, sequence["position"], sequence["length"]
            )
            for token in sequence["tokens"]:
                gate = write[token["position"] - sequence["position"]]
                assert abs(gate - token["gate"]) <= 0.00051 * shown["largest"][0]


def test_a_page_of_a_text_alone_and_what_has_none(corpus, model, tmp_path):
    alone = channel_report(model, corpus.tokenizer, text="The river.")
    write_text(tmp_path / "page.html", channel_page(alone, model, None))
    (data,) = Reader((tmp_path / "page.html").read_text(encoding="utf-8")).blocks
    assert len(data["texts"]) == 1
    assert data["documents"] == []
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

        tab.emulate_media(color_scheme="dark")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 18, 22)"
