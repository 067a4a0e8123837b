"""What a scan finds in windows, against brute force; hidden states on disk."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from prismlm.corpus import Corpus
from prismlm.errors import InputError
from prismlm.lens import scan as module
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.lens import Lens
from prismlm.lens.scan import probabilities, read_states, scan_windows
from prismlm.ops.prototype_head import naive
from tests.helpers.lens_files import cells_and_tokens

OPTIONS = IndexOptions(contexts=4, window=64, stride=48)


def brute_windows(z, prototypes, owned, threshold):
    """(window, offset, prototype) of each window's first best owned position above a threshold."""
    cosines = torch.nn.functional.cosine_similarity(
        z[:, :, None].double(), prototypes[None, None].double(), dim=-1
    )
    best, offset = cosines.masked_fill(~owned[:, :, None], -math.inf).max(1)
    window, prototype = (best >= threshold).nonzero(as_tuple=True)
    rows = zip(window.tolist(), offset[window, prototype].tolist(), prototype.tolist(), strict=True)
    return {row: best[row[0], row[2]].item() for row in rows}


@pytest.mark.parametrize("threshold", [-2.0, 0.45])
@pytest.mark.parametrize("length", [20, 64, 7])
@pytest.mark.parametrize("tile", [1, 2**24])
def test_scan_windows_equals_brute_force(monkeypatch, length, threshold, tile):
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile)
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
    candidates = dict(zip(zip(*columns, strict=True), scan.cosine.tolist(), strict=True))
    assert candidates == pytest.approx(expected, abs=1e-6)
    assert len(candidates) == len(scan.cosine)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_the_probability_of_the_next_token(bias):
    torch.manual_seed(bias)
    model, head, z = nn.Module(), nn.Linear(32, 700, bias=bias), torch.randn(400, 32)
    model.get_output_embeddings = lambda: head
    tokens = torch.randint(700, (400,))
    expected = head(z).softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(probabilities(model, z, tokens), expected)
    half = probabilities(model, z, tokens, bf16=True)
    torch.testing.assert_close(half, expected, rtol=0.03, atol=0)
    assert probabilities(model, z[:0], tokens[:0]).shape == (0,)


@pytest.fixture(scope="module")
def corpus(short_corpus):
    return Corpus.open(short_corpus)


@pytest.fixture(scope="module")
def stored(lm, corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("stored") / "states"
    return read_states(lm.model, corpus, directory, OPTIONS, limit_bytes=1e9)


def indexed(lm, corpus, out, states=None):
    build_index(lm.model, lm.head, corpus, out, OPTIONS, states=states)
    return Lens.open(out, lm.model, lm.head)


def test_a_limit_stores_whole_blocks_and_an_index_runs_the_model_for_the_others(
    stored, lm, corpus, tmp_path
):
    directory = tmp_path / "states"
    some = read_states(lm.model, corpus, directory, OPTIONS, limit_bytes=1e5)
    blocks = len(some.ends) - 1
    assert 0 < blocks < len(stored.ends) - 1
    for slot in range(blocks):
        assert torch.equal(some.of_block(slot), stored.of_block(slot))
    assert some.of_block(blocks) is None
    lens = indexed(lm, corpus, tmp_path / "lens", some)
    assert len(lens.cells) == lens.meta.tokens > len(some)
    with pytest.raises(InputError, match="another model, corpus or setting"):
        read_states(lm.model, corpus, directory, replace(OPTIONS, window=48), limit_bytes=1e5)


def test_an_index_from_states_is_nearly_the_index_of_the_model(stored, lm, corpus, tmp_path):
    cells, others = (
        indexed(lm, corpus, tmp_path / f"{n}", states).cells
        for n, states in enumerate([None, stored])
    )
    documents = corpus.split("train")
    spans = zip(corpus.starts[documents] + 1, corpus.lengths[documents] - 1, strict=True)
    # Every token but the first of a document is predicted once.
    expected = sorted(np.concatenate([corpus.read_tokens(*map(int, span)) for span in spans]))
    assert sorted(stored.tokens()) == sorted(cells_and_tokens(cells)[1]) == expected
    # The rounding to bfloat16 moves some positions between neighbouring cells.
    records = [each.records(np.arange(len(stored))) for each in (cells, others)]
    one, other = (each[each["position"].argsort()] for each in records)
    np.testing.assert_array_equal(one["position"], other["position"])
    assert np.abs(one["code"].astype(int) - other["code"]).max(1).mean() < 2
    assert len(cells) == len(others) == len(stored)
