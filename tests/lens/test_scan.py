"""What a scan finds in windows, against brute force, and how it counts sources up to the cap."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from prismlm.lens import scan as module
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.scan import OTHER, count_uses, groups_of, mass_table, scan_windows
from prismlm.lens.states import probabilities
from prismlm.ops.prototype_head import Nearest, naive


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


class Documents:
    """What counting needs of a corpus: documents of one source each, with so many tokens."""

    def __init__(self, keys, tokens=9):
        columns = [pa.array(column, pa.string()) for column in zip(*keys, strict=True)]
        self.lengths = np.full(len(keys), tokens)
        self.documents = pa.table(dict(zip(GROUP_COLUMNS, columns, strict=True)))

    def __len__(self):
        return len(self.lengths)

    def split(self, name):
        return np.arange(len(self))


def mass_of(groups, documents):
    """Two positions of each document n = 0, 1 … use prototypes 0 and 1 with n + ½ and 2."""
    mass = torch.zeros(2, len(groups.keys), 3, dtype=torch.int64)
    for number in documents:
        indices = torch.tensor([[0, 2], [1, 2]])
        activations = torch.tensor([[number + 0.5, 0.0], [2.0, -1.0]])
        used = Nearest(indices, activations, activations)
        count_uses(mass, groups.of_document[[number, number]], used)
    return mass_table(mass, groups.keys)


def rows_of(table):
    """Return {(prototype, source, domain, licence): (tokens, activation_sum)}."""
    *keys, tokens, sums = table.to_pydict().values()
    return dict(zip(zip(*keys, strict=True), zip(tokens, sums, strict=True), strict=True))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_every_group_has_its_rows_in_any_order(order):
    keys = [("a", "law", "CC0"), ("b", "law", "CC0"), ("c", "law", None), ("a", "law", "CC0")]
    groups = groups_of(Documents(keys), "all")
    assert groups.keys == keys[:3]
    assert rows_of(mass_of(groups, order)) == {
        (0, "a", "law", "CC0"): (2, 4.0),
        (1, "a", "law", "CC0"): (2, 4.0),
        (0, "b", "law", "CC0"): (1, 1.5),
        (1, "b", "law", "CC0"): (1, 2.0),
        (0, "c", "law", None): (1, 2.5),
        (1, "c", "law", None): (1, 2.0),
    }


@pytest.mark.parametrize("beyond", [0, 1, 60])
def test_the_cap_is_2048_and_no_use_is_lost(beyond):
    count = 2048 + beyond
    groups = groups_of(Documents([(f"s{n:05d}", "law", "CC0") for n in range(count)]), "all")
    assert len(groups.keys) == 2048 + (beyond > 0)
    table = mass_of(groups, range(count))
    assert sum(table["tokens"].to_pylist()) == 2 * count
    if beyond:
        # Σ (n + ½) over n = 2048 … 2048 + beyond − 1, and 2 for each.
        rows, other = rows_of(table), (OTHER, OTHER, OTHER)
        assert rows[0, *other] == (beyond, beyond * (2048 + beyond / 2))
        assert rows[1, *other] == (beyond, 2.0 * beyond)
