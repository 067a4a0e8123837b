"""Pictures of attention maps: the right weights, and labels that can be read."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, Head
from prismlm.pages.attention_plots import maps_figure

WORDS = (
    "The frog found a shiny key . He went home and looked for a very extraordinarily old door "
    "in the wall , but $ x $ 日 was not the\n door"
)
SENTENCE = WORDS.split(" ")


def maps(tokens, count=1, rows=slice(None)):
    generator = torch.Generator().manual_seed(0)
    size = len(tokens)
    scores = torch.randn(count, size, size, generator=generator)
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    names = tuple(f" {token}" for token in tokens)
    return [
        AttentionMap(Head(6, n, "signal", n), names, tuple(range(size)), own)[rows]
        for n, own in enumerate(weights)
    ]


def test_panels_show_the_weights_over_one_scale():
    own = maps(SENTENCE[:9], 3)
    figure = maps_figure(own)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left").startswith("layer")]
    assert [axes.get_title(loc="left") for axes in panels] == [
        f"layer 6 · signal head {n}" for n in range(3)
    ]
    largest = max(float(one.weights[1:].max()) for one in own)
    for axes, one in zip(panels, own, strict=True):
        image = axes.images[0]
        shown = image.get_array()
        assert torch.equal(torch.from_numpy(shown.filled(0)), one.weights)
        # What is not seen yet is no weight of 0.
        assert shown.mask[0].tolist() == [False] + [True] * 8
        assert (image.norm.vmin, image.norm.vmax) == (0, pytest.approx(largest))
        assert [label.get_text() for label in axes.get_yticklabels()] == SENTENCE[:9]


def test_pictures_that_could_not_be_read():
    with pytest.raises(InputError, match="49 tokens, and a picture shows at most 48"):
        maps_figure(maps(["word"] * 49))
    with pytest.raises(InputError, match=r"33 heads are too many .* at most 32"):
        maps_figure(maps(["one", "two"], 33))
    with pytest.raises(InputError, match="no map to draw"):
        maps_figure([])
