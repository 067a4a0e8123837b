"""Routing of owned positions, and the best of each window, against brute force."""

import math

import pytest
import torch

from prismlm.index.scan import scan_windows
from prismlm.ops.prototype_head import fast, naive


def brute_windows(z, prototypes, owned, threshold):
    """(window, offset, prototype) of each window's first best owned position above a threshold."""
    cosines = torch.nn.functional.cosine_similarity(
        z[:, :, None].double(), prototypes[None, None].double(), dim=-1
    )
    masked = cosines.masked_fill(~owned[:, :, None], -math.inf)
    best, offset = masked.max(1)
    window, prototype = (best >= threshold).nonzero(as_tuple=True)
    rows = zip(window.tolist(), offset[window, prototype].tolist(), prototype.tolist(), strict=True)
    return {row: best[row[0], row[2]].item() for row in rows}


@pytest.mark.parametrize("threshold", [-1.0, 0.45])
@pytest.mark.parametrize("length", [20, 64, 7])
def test_scan_windows_equals_brute_force(length, threshold):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4, length, 8, generator=generator)
    prototypes = torch.randn(30, 8, generator=generator)
    owned = torch.rand(4, length, generator=generator) > 0.4
    owned[2] = False
    scan = scan_windows(z, prototypes, 4, owned, torch.full((30,), threshold))
    flat = naive.route(z[owned], prototypes, 4, 1.0)
    assert torch.equal(scan.indices, flat.indices)
    torch.testing.assert_close(scan.cosines, flat.cosines)
    expected = brute_windows(z, prototypes, owned, threshold)
    columns = scan.window.tolist(), scan.offset.tolist(), scan.prototype.tolist()
    found = dict(zip(zip(*columns, strict=True), scan.cosine.tolist(), strict=True))
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(found) == len(scan.cosine)


def test_tiles_give_the_same_best_of_each_window(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(5, 64, 24, generator=generator)
    prototypes = torch.randn(50, 24, generator=generator)
    owned = torch.rand(5, 64, generator=generator) > 0.3
    monkeypatch.setattr(fast, "TILE_ELEMENTS", 50 * 32)
    scan = scan_windows(z, prototypes, 3, owned)
    assert torch.equal(scan.indices, naive.route(z[owned], prototypes, 3, 1.0).indices)
    best = {}
    columns = scan.window.tolist(), scan.prototype.tolist(), scan.cosine.tolist()
    for window, prototype, cosine, offset in zip(*columns, scan.offset.tolist(), strict=True):
        held = best.get((window, prototype), (-2.0, 0))
        best[window, prototype] = max(held, (cosine, -offset))
    expected = brute_windows(z, prototypes, owned, -2.0)
    found = {(window, -offset, i): cosine for (window, i), (cosine, offset) in best.items()}
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_threshold_leaves_candidates_out_and_changes_no_bit_of_the_others():
    generator = torch.Generator().manual_seed(7)
    z = torch.randn(6, 128, 64, generator=generator)
    prototypes = torch.randn(1100, 64, generator=generator)
    owned = torch.rand(6, 128, generator=generator) > 0.3
    everything = scan_windows(z, prototypes, 4, owned)
    some = scan_windows(z, prototypes, 4, owned, torch.full((1100,), 0.35))
    assert torch.equal(some.indices, everything.indices)
    assert torch.equal(some.cosines, everything.cosines)
    kept = everything.cosine >= 0.35
    assert 0 < kept.sum() < len(kept)
    for one, other in zip(some[2:], everything[2:], strict=True):
        assert torch.equal(one, other[kept])


def test_windows_that_own_nothing():
    z = torch.randn(2, 10, 4)
    scan = scan_windows(z, torch.randn(6, 4), 2, torch.zeros(2, 10, dtype=torch.bool))
    assert [column.shape[0] for column in scan] == [0] * 6
    assert scan.indices.shape == (0, 2)
