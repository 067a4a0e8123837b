"""The page holds the gates it shows, lets no text become markup, and works in a browser."""

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
from prismlm.pages.channels import channel_page, channels_data
from prismlm.probes.channels import read_channels
from prismlm.probes.channels.report import channel_report
from tests.helpers.html_reader import Reader
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_llama, make_model
from tests.helpers.small_tokenizers import begun_tokenizer, texts
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


def reported(model, corpus, length):
    sequences = Sequences(corpus, "all", length)
    return channel_report(model, corpus.tokenizer, sequences, text=TEXT, name=EVIL)


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
    report = reported(model, corpus, length)
    assert any(passage.offset for passage in report.passages.values()) or source == "corpus"
    data = channels_data(model, corpus, report)
    assert "NaN" not in json.dumps(data, allow_nan=False)
    assert [len(layer["channels"]) for layer in data["layers"]] == [CHANNELS] * LAYERS
    # The tokens before each text, and its curves by layer.
    read = {None: (0, report.text.curves)}
    for start, passage in report.passages.items():
        prefix = corpus.prefix if passage.offset else []
        ids = [*prefix, *corpus.read_tokens(start, len(passage.text.tokens)).tolist()]
        read[start] = len(prefix), read_channels(model, torch.tensor(ids))
    for layer, k in product(range(LAYERS), range(CHANNELS)):
        shown, shared = data["layers"][layer]["channels"][k], data["layers"][layer]["shared"]
        assert (shown["halfLife"] is not None) == (decay_mode == "channel")
        # Of the report's own text, which comes first, and of those of the corpus.
        sequences = [
            {"position": None, "tokens": []},
            *report.layers[layer].channels[k]["sequences"],
        ]
        triples = zip(shown["texts"], shown["gates"], sequences, strict=True)
        for (number, _), gates, sequence in triples:
            text, position = data["texts"][number], sequence["position"]
            skipped, curves = read[position]
            own = TEXT if position is None else excerpt(corpus, position, sequence["length"])
            assert "".join(text["words"]) == own
            length = sum(text["many"].get(i, 1) for i in range(len(text["words"])))
            assert len(gates["write"]) == length
            for kind, most in zip(("write", "read"), shown["largest"], strict=True):
                kept = np.array(gates["write" if shared else kind]) / 1000 * most
                own = getattr(curves[layer], kind)[skipped:, k].numpy()
                assert np.abs(kept - own).max() <= 0.00051 * most
            assert ("decay" in gates) == (decay_mode == "token")
            if "decay" in gates:
                logs = curves[layer].decay[skipped:, k].double().log()
                np.testing.assert_allclose(np.log(gates["decay"]), logs, rtol=0.002)
            most = shown["largest"][0]
            for token in sequence["tokens"]:
                gate = gates["write"][token["position"] - position] / 1000 * most
                assert abs(gate - token["gate"]) <= 0.00051 * most


def test_a_page_of_a_text_alone_and_what_has_none(corpus, model):
    alone = channel_report(model, corpus.tokenizer, text="The river.")
    (data,) = Reader(channel_page(alone, model, None)).blocks
    assert len(data["texts"]) == 1
    assert data["documents"] == []
    llama = make_llama(len(corpus.tokenizer))
    heads = channel_report(llama, corpus.tokenizer, Sequences(corpus, "all", 48), name="llama")
    with pytest.raises(InputError, match="llama has no channels"):
        channel_page(heads, llama, corpus)


def assert_finds(words, chosen, text, memory):
    """What the chosen word finds: the figures of the library."""
    weights = memory[sum(text.counts[: chosen + 1]) - 1]
    shares = np.bincount(text.word_of, weights.numpy(), len(text.words))
    labels = words.evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
    for label, share in zip(labels, shares, strict=True):
        match = re.search(r"memory (<1|\d+) %", label)
        assert match, label
        assert abs(float(match[1].strip("<")) / 100 - share) < 0.02
    strength = words.evaluate_all("all => all.map((one) => +one.style.getPropertyValue('--a'))")
    last = chosen + 1
    assert strength[:last] == pytest.approx(shares[:last] / max(shares), abs=0.03)
    assert strength[last] == 0


def test_in_a_browser(opened, corpus, model):
    report = reported(model, corpus, 48)
    with opened(channel_page(report, model, corpus)) as tab:
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
