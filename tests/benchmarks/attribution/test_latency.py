"""A large lens for measurements is that of its text, repeated."""

import numpy as np

import prismlm
from benchmarks.attribution.latency import enlarge, time_tokens


def test_a_large_lens_is_that_of_the_text_repeated(tiny_model, tmp_path):
    lm = prismlm.load(tiny_model)
    enlarge(lm.lens, tmp_path / "large", 3 * len(lm.lens.cells))
    large = prismlm.load(tiny_model, lens=tmp_path / "large")
    small, cells = lm.lens.cells, large.lens.cells
    assert len(cells) == 3 * len(small)
    assert (cells.keys_and_starts[1] == 3 * small.keys_and_starts[1]).all()
    stops = np.append(small.keys_and_starts[1], len(small))
    first, last = int(stops[5]), int(stops[6])
    one = small.records(np.arange(first, last))["position"].astype(np.int64)
    many = cells.records(np.arange(3 * first, 3 * last))["position"].reshape(3, -1)
    copies = len(small.documents) * np.arange(3)[:, None]
    assert (cells.document_of(many) == small.document_of(one) + copies).all()
    assert large.lens.corpus is None
    text = [opened.lens.sentence(int(p)) for opened, p in ((lm, one[0]), (large, many[2, 0]))]
    assert text[1].token == text[0].token
    row = time_tokens(large, ["the heart and the body"])
    assert row["codes"] == small.meta.codes
    assert 0 < row["again"][0] <= row["again"][1]
