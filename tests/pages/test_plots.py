"""What is drawn is what was measured: channels and attention maps."""

import numpy as np
import pytest
import torch

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, Head
from prismlm.pages.plots import curves_figure, half_life_figure, maps_figure, most_written
from prismlm.probes.channels.report import channel_report
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_corpus, make_llama, make_model

TEXT = "Old maps of the river. "
SENTENCE = ["The", "frog", "found", "a", "shiny", "key", ".", "He", "went"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def report(corpus):
    return channel_report(make_model(len(corpus.tokenizer)), corpus.tokenizer, text=TEXT)


def test_every_channel_is_in_the_histogram_of_its_layer(report):
    panels = half_life_figure(report).axes
    assert len(panels) == LAYERS
    for axes, layer in zip(panels, report.layers, strict=True):
        assert sum(bar.get_height() for bar in axes.patches) == CHANNELS
        median = np.median([channel["half_life"] for channel in layer.channels])
        assert axes.lines[0].get_xdata()[0] == pytest.approx(median)


def test_curves_are_the_gates(report):
    gates, held = curves_figure(report.text, 1, 4).axes
    curves = report.text.curves[1]
    for line, gate in zip(gates.lines, (curves.write, curves.read), strict=True):
        assert line.get_ydata().tolist() == gate[:, 4].tolist()
    labels = [label.get_text() for label in held.get_xticklabels()]
    assert len(labels) == len(report.text.text.tokens)
    assert labels[0] == report.text.text.tokens[0]
    assert "half-life" in gates.get_title(loc="left")
    layer, channel = most_written(report.text)
    best = max(c.write.max().item() for c in report.text.curves)
    assert report.text.curves[layer].write[:, channel].max().item() == best


def test_what_cannot_be_drawn_is_refused(corpus, report):
    by_token = make_model(len(corpus.tokenizer), decay_mode="token")
    for model, sequences in (
        (by_token, None),
        (make_llama(len(corpus.tokenizer)), Sequences(corpus, "all", 16)),
    ):
        without = channel_report(model, corpus.tokenizer, sequences)
        with pytest.raises(InputError, match="have no half-lives to draw"):
            half_life_figure(without)
    with pytest.raises(InputError, match="layer 1, channel 6"):
        curves_figure(report.text, 1, CHANNELS)


def attention_maps(tokens, count=1):
    size = len(tokens)
    scores = torch.randn(count, size, size, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    names = tuple(f" {token}" for token in tokens)
    return [AttentionMap(Head(6, n, "signal", n), own, names) for n, own in enumerate(weights)]


def test_attention_panels_show_the_weights_over_one_scale():
    maps = attention_maps(SENTENCE, 3)
    panels = [a for a in maps_figure(maps).axes if a.get_title(loc="left").startswith("layer")]
    assert [axes.get_title(loc="left") for axes in panels] == [
        f"layer 6 · signal head {n}" for n in range(3)
    ]
    largest = max(float(one.weights[1:].max()) for one in maps)
    for axes, one in zip(panels, maps, strict=True):
        image = axes.images[0]
        shown = image.get_array()
        assert torch.equal(torch.from_numpy(shown.filled(0)), one.weights)
        # What is not seen yet is no weight of 0.
        assert shown.mask[0].tolist() == [False] + [True] * 8
        assert (image.norm.vmin, image.norm.vmax) == (0, pytest.approx(largest))
        assert [label.get_text() for label in axes.get_yticklabels()] == [f"·{x}" for x in SENTENCE]


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (attention_maps(["word"] * 49), "at most 48 tokens, not 1 and 49"),
        (attention_maps(["one", "two"], 33), "1 to 32 heads .*, not 33 and 2"),
        ([], "not 0 and 0"),
    ],
)
def test_attention_pictures_that_could_not_be_read(maps, words):
    with pytest.raises(InputError, match=words):
        maps_figure(maps)
