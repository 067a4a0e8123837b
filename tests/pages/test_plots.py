"""Attention maps that are drawn are those that were measured."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, Head
from prismlm.pages.plots import maps_figure

SENTENCE = ["The", "frog", "found", "a", "shiny", "key", ".", "He", "went"]


def attention_maps(tokens, count=1):
    size = len(tokens)
    scores = torch.randn(count, size, size, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    names = tuple(f" {token}" for token in tokens)
    return [AttentionMap(Head(6, n, "signal", n), own, names) for n, own in enumerate(weights)]


def test_attention_panels_show_the_weights_over_one_scale_and_no_more_than_can_be_read():
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
    with pytest.raises(InputError, match="at most 48 tokens, not 1 and 49"):
        maps_figure(attention_maps(["word"] * 49))
