"""What a scan finds in windows, against brute force."""

import math

import pytest
import torch
from torch import nn

from prismlm.lens import scan as module
from prismlm.lens.scan import scan_windows
from prismlm.lens.states import probabilities
from prismlm.ops.prototype_head import naive


def brute_windows(z, prototypes, owned, threshold):
    """(window, offset, prototype) of each window's first best owned position above a threshold."""
    cosines = torch.nn.functional.cosine_similarity(
        z[:, :, None].double(), prototypes[None, None].double(), dim=-1
    )
    best, offset = cosines.masked_fill(~owned[:, :, None], -math.inf).max(1)
    window, prototype = (best >= threshold).nonzero(as_tuple=True)
    rows = zip(window.tolist(), offset[window, prototype].tolist(), prototype.tolist(), strict=True)
    return {row: best[row[0], row[2]].item() for row in rows}


@pytest.mark.parametrize("threshold", [None, -1.0, 0.45])
@pytest.mark.parametrize("length", [20, 64, 7])
@pytest.mark.parametrize("tile", [1, 2**24])
def test_scan_windows_equals_brute_force(monkeypatch, length, threshold, tile):
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4, length, 8, generator=generator)
    prototypes = torch.randn(30, 8, generator=generator)
    owned = torch.rand(4, length, generator=generator) > 0.4
    owned[2] = False
    least = None if threshold is None else torch.full((30,), threshold)
    scan = scan_windows(z, prototypes, 4, owned, least)
    flat = naive.route(z[owned], prototypes, 4, 1.0)
    assert torch.equal(scan.indices, flat.indices)
    torch.testing.assert_close(scan.cosines, flat.cosines)
    expected = brute_windows(z, prototypes, owned, -2.0 if threshold is None else threshold)
    columns = scan.window.tolist(), scan.offset.tolist(), scan.prototype.tolist()
    candidates = dict(zip(zip(*columns, strict=True), scan.cosine.tolist(), strict=True))
    assert candidates == pytest.approx(expected, abs=1e-6)
    assert len(candidates) == len(scan.cosine)


class Decoder(nn.Module):
    """An output embedding alone, which is what likelihoods ask of a model."""

    def __init__(self, bias):
        super().__init__()
        self.head = nn.Linear(32, 700, bias=bias)

    def get_output_embeddings(self):
        return self.head


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_the_probability_of_the_next_token(bias):
    torch.manual_seed(bias)
    model, z = Decoder(bias), torch.randn(400, 32)
    tokens = torch.randint(700, (400,))
    expected = model.head(z).softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(probabilities(model, z, tokens), expected)
    half = probabilities(model, z, tokens, bf16=True)
    torch.testing.assert_close(half, expected, rtol=0.03, atol=0)
    assert probabilities(model, z[:0], tokens[:0]).shape == (0,)
