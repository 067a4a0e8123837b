"""What is drawn is what was measured: channels, attention maps, accuracies of a suite."""

import math

import numpy as np
import pytest
import torch

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.eval.suite import mean_figures, task_figures
from prismlm.explain.attention_maps import AttentionMap, Head
from prismlm.pages.plots import (
    accuracy_figure,
    channel_figures,
    curves_figure,
    half_life_figure,
    lag_figure,
    locality_figure,
    maps_figure,
    metrics_figure,
    most_written,
)
from prismlm.probes.channels.report import channel_report
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_corpus, make_llama, make_model

# Twice the tokens of a row, so that curves take several rows.
TEXT = "Old maps of the river. " * 16
SENTENCE = ["The", "frog", "found", "a", "shiny", "key", ".", "He", "went"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def read(corpus):
    """Return the report of a model over the corpus, or over a text alone."""

    def report(model=None, text=None, name="", *, corpus_too=True):
        model = model or make_model(len(corpus.tokenizer))
        sequences = Sequences(corpus, "all", 16) if corpus_too else None
        return channel_report(model, corpus.tokenizer, sequences, text=text, name=name)

    return report


@pytest.fixture(scope="module")
def report(read):
    return read(text=TEXT, name="tiny")


@pytest.fixture(scope="module")
def llama(read, corpus):
    return read(make_llama(len(corpus.tokenizer), kv_heads=4), name="llama")


@pytest.fixture(scope="module")
def text_only(read):
    return read(text="Old maps.", corpus_too=False)


def test_metrics_over_depth_with_a_second_model(report, llama):
    panels = metrics_figure(report, llama).axes
    names = ("sparsity_ratio", "gini", "entropy_share", "mutual_information_corrected")
    for axes, name in zip(panels, names, strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        for kind in ("write", "read"):
            line = lines[f"{kind} gates of tiny, P = {CHANNELS}"]
            expected = [layer.metrics[kind][name] for layer in report.layers]
            assert line.get_ydata().tolist() == expected
            assert line.get_xdata().tolist() == list(range(LAYERS))
        heads = lines["value heads of llama, P = 4"]
        expected = [layer.metrics["values"][name] for layer in llama.layers]
        assert heads.get_ydata().tolist() == expected


def test_every_channel_is_in_the_histogram_of_its_layer(report):
    panels = half_life_figure(report).axes
    assert len(panels) == LAYERS
    for axes, layer in zip(panels, report.layers, strict=True):
        assert sum(bar.get_height() for bar in axes.patches) == CHANNELS
        median = np.median([channel["half_life"] for channel in layer.channels])
        assert axes.lines[0].get_xdata()[0] == pytest.approx(median)


def test_channels_with_equal_decays(read, corpus):
    model = make_model(len(corpus.tokenizer))
    for block in model.model.layers:
        with torch.no_grad():
            block.mixer.decay_logits.fill_(3.0)
    equal = read(model)
    assert sum(bar.get_height() for bar in half_life_figure(equal).axes[0].patches) == CHANNELS
    words = locality_figure(equal)._supxlabel.get_text()
    assert "no rho: the half-life of all 18 channels is equal" in words


def test_locality_has_a_point_for_each_channel_and_the_quartile_means(report):
    figure = locality_figure(report)
    (axes,) = figure.axes
    points = [collection.get_offsets() for collection in axes.collections[:LAYERS]]
    for layer, offsets in zip(report.layers, points, strict=True):
        expected = [[c["half_life"], c["repetition"]] for c in layer.channels]
        assert offsets.tolist() == pytest.approx(np.array(expected))
    means = [c.get_segments()[0][0][1] for c in axes.collections[LAYERS:]]
    expected = [row["repetition"] for row in report.locality.rows]
    assert means == pytest.approx([mean for mean in expected if not math.isnan(mean)])
    assert "rho: " in figure._supxlabel.get_text()


def test_curves_are_the_gates_over_all_rows(report):
    figure = curves_figure(report.text, 1, 4)
    gates, masses = figure.axes[::2], figure.axes[1::2]
    assert len(gates) > 1
    curves = report.text.curves[1]
    for place, gate in ((0, curves.write), (1, curves.read)):
        drawn = np.concatenate([axes.lines[place].get_ydata() for axes in gates])
        assert drawn.tolist() == gate[:, 4].tolist()
    labels = [label.get_text() for axes in masses for label in axes.get_xticklabels()]
    assert len(labels) == len(report.text.text.tokens)
    assert labels[0] == report.text.text.tokens[0]
    assert "half-life" in gates[0].get_title(loc="left")
    layer, channel = most_written(report.text)
    best = max(c.write.max().item() for c in report.text.curves)
    assert report.text.curves[layer].write[:, channel].max().item() == best


def test_lags_with_their_null(report):
    for axes, layer in zip(lag_figure(report).axes, report.layers, strict=True):
        drawn = np.stack([line.get_ydata() for line in axes.lines[:CHANNELS]])
        assert drawn == pytest.approx(layer.lags["correlation"].numpy())
        assert axes.lines[CHANNELS].get_ydata() == pytest.approx(np.median(drawn, 0))
        band = axes.collections[0].get_paths()[0].vertices[:, 1]
        mean = np.median(layer.lags["null_mean"].numpy(), 0)
        spread = 1.96 * np.median(layer.lags["null_deviation"].numpy(), 0)
        assert band.max() == pytest.approx((mean + spread).max())
        assert band.min() == pytest.approx((mean - spread).min())


def test_a_report_has_the_figures_of_what_it_holds(read, corpus, report, llama, text_only):
    everything = channel_figures(report, llama, curve=(2, 3))
    assert sorted(everything) == ["curves-l2-c3", "half-life", "lags", "locality", "metrics"]
    assert sorted(channel_figures(llama)) == ["metrics"]
    layer, channel = most_written(text_only.text)
    assert sorted(channel_figures(text_only)) == [f"curves-l{layer}-c{channel}", "half-life"]
    by_token = read(make_model(len(corpus.tokenizer), decay_mode="token"), text="Old maps.")
    drawn = channel_figures(by_token, curve=(1, 2))
    assert set(drawn) == {"metrics", "lags", "curves-l1-c2"}
    title = drawn["curves-l1-c2"].axes[0].get_title(loc="left")
    assert title.endswith("positions over the text")
    for figure in (half_life_figure, locality_figure):
        with pytest.raises(InputError, match="have no half-lives to draw"):
            figure(by_token)


def test_what_cannot_be_drawn_is_refused(report, llama, text_only):
    for figure in (metrics_figure, locality_figure, lag_figure):
        with pytest.raises(InputError, match=r"needs? a corpus"):
            figure(text_only)
    with pytest.raises(InputError, match="llama has no channels"):
        half_life_figure(llama)
    with pytest.raises(InputError, match="layer 1, channel 6"):
        curves_figure(report.text, 1, CHANNELS)


def attention_maps(tokens, count=1):
    size = len(tokens)
    scores = torch.randn(count, size, size, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    names, positions = tuple(f" {token}" for token in tokens), tuple(range(size))
    return [
        AttentionMap(Head(6, n, "signal", n), names, positions, own)
        for n, own in enumerate(weights)
    ]


def test_attention_panels_show_the_weights_over_one_scale():
    maps = attention_maps(SENTENCE[:9], 3)
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
        assert [label.get_text() for label in axes.get_yticklabels()] == SENTENCE[:9]


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (attention_maps(["word"] * 49), "49 tokens, and a picture shows at most 48"),
        (attention_maps(["one", "two"], 33), r"33 heads are too many .* at most 32"),
        ([], "no map to draw"),
    ],
)
def test_attention_pictures_that_could_not_be_read(maps, words):
    with pytest.raises(InputError, match=words):
        maps_figure(maps)


def test_accuracies_have_bars_and_a_band():
    answers = {
        "task": "some",
        "of": 4,
        "chosen": [0, 1, 2, 3],
        "gold": [0, 1, 1, 1],
        "choices": [4, 4, 4, 4],
        "truncated": 0,
        "correct": {"plain": {"acc": [1, 1, 0, 0]}, "prototype_only": {"acc": [1, 0, 0, 0]}},
    }
    task = task_figures(answers) | {"title": "Some"}
    result = {"tasks": [task], "mean": mean_figures([task]), "metric": "acc", "band_percent": 5.0}
    (axes,) = accuracy_figure(result | {"predictors": ["plain", "prototype_only"]}).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["Some", "mean"]
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5, 0.25, 0.25]
    bands = [
        collection.get_paths()[0].get_extents()
        for collection in axes.collections
        if type(collection).__name__ == "FillBetweenPolyCollection"
    ]
    assert [(band.y0, band.y1) for band in bands] == [pytest.approx((0.475, 0.525))] * 2
