"""What is drawn is what was found."""

import math

import numpy as np
import pytest
import torch

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.pages.channel_plots import (
    curves_figure,
    figures,
    half_life_figure,
    lag_figure,
    locality_figure,
    metrics_figure,
    most_written,
)
from prismlm.probes.channels.report import channel_report
from tests.helpers.mixer_models import CHANNELS, LAYERS, make_corpus, make_llama, make_model

# Twice the tokens of a row, so that curves take several rows.
TEXT = "Old maps of the river. " * 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def report(corpus):
    return channel_report(
        make_model(len(corpus.tokenizer)),
        corpus.tokenizer,
        Sequences(corpus, "all", 16),
        text=TEXT,
        name="tiny",
    )


@pytest.fixture(scope="module")
def llama(corpus):
    model = make_llama(len(corpus.tokenizer), kv_heads=4)
    return channel_report(model, corpus.tokenizer, Sequences(corpus, "all", 16), name="llama")


@pytest.fixture(scope="module")
def text_only(corpus):
    return channel_report(make_model(len(corpus.tokenizer)), corpus.tokenizer, text="Old maps.")


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


def test_channels_that_decay_alike_can_be_drawn(corpus):
    model = make_model(len(corpus.tokenizer))
    for block in model.model.layers:
        with torch.no_grad():
            block.mixer.decay_logits.fill_(3.0)
    found = channel_report(model, corpus.tokenizer, Sequences(corpus, "all", 16))
    assert sum(bar.get_height() for bar in half_life_figure(found).axes[0].patches) == CHANNELS
    words = locality_figure(found)._supxlabel.get_text()
    assert "no rho: the half-life of all 18 channels is equal" in words


def test_locality_has_a_point_for_each_channel_and_the_quartiles_means(report):
    figure = locality_figure(report)
    (axes,) = figure.axes
    points = [collection.get_offsets() for collection in axes.collections[:LAYERS]]
    for layer, found in zip(report.layers, points, strict=True):
        expected = [[c["half_life"], c["repetition"]] for c in layer.channels]
        assert found.tolist() == pytest.approx(np.array(expected))
    means = [c.get_segments()[0][0][1] for c in axes.collections[LAYERS:]]
    expected = [row["repetition"] for row in report.locality.rows]
    expected = [mean for mean in expected if not math.isnan(mean)]
    assert means == pytest.approx(expected)
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
    figure = lag_figure(report)
    for axes, layer in zip(figure.axes, report.layers, strict=True):
        drawn = np.stack([line.get_ydata() for line in axes.lines[:CHANNELS]])
        assert drawn == pytest.approx(layer.lags["correlation"].numpy())
        assert axes.lines[CHANNELS].get_ydata() == pytest.approx(np.median(drawn, 0))
        band = axes.collections[0].get_paths()[0].vertices[:, 1]
        mean = np.median(layer.lags["null_mean"].numpy(), 0)
        spread = 1.96 * np.median(layer.lags["null_deviation"].numpy(), 0)
        assert band.max() == pytest.approx((mean + spread).max())
        assert band.min() == pytest.approx((mean - spread).min())


def test_what_there_is_is_drawn_and_nothing_else(report, llama, text_only, tmp_path):
    everything = figures(report, llama, curve=(2, 3))
    assert sorted(everything) == ["curves-l2-c3", "half-life", "lags", "locality", "metrics"]
    assert sorted(figures(llama)) == ["metrics"]
    layer, channel = most_written(text_only.text)
    assert sorted(figures(text_only)) == [f"curves-l{layer}-c{channel}", "half-life"]
    everything["metrics"].savefig(tmp_path / "metrics.svg")
    assert (tmp_path / "metrics.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_what_cannot_be_drawn_is_refused(report, llama, text_only):
    with pytest.raises(InputError, match="need a corpus"):
        metrics_figure(text_only)
    with pytest.raises(InputError, match="needs a corpus"):
        locality_figure(text_only)
    with pytest.raises(InputError, match="need a corpus"):
        lag_figure(text_only)
    with pytest.raises(InputError, match="llama has no channels"):
        half_life_figure(llama)
    with pytest.raises(InputError, match="layer 1, channel 6"):
        curves_figure(report.text, 1, CHANNELS)


def test_decays_by_token_have_every_figure_but_those_of_half_lives(corpus):
    by_token = channel_report(
        make_model(len(corpus.tokenizer), decay_mode="token"),
        corpus.tokenizer,
        Sequences(corpus, "all", 16),
        text="Old maps.",
    )
    drawn = figures(by_token, curve=(1, 2))
    assert set(drawn) == {"metrics", "lags", "curves-l1-c2"}
    title = drawn["curves-l1-c2"].axes[0].get_title(loc="left")
    assert title.endswith("positions over the text")
    for figure in (half_life_figure, locality_figure):
        with pytest.raises(InputError, match="have no half-lives to draw"):
            figure(by_token)
