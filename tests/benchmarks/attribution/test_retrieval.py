"""The baselines that attribution is compared with."""

import math

import numpy as np

from benchmarks.attribution.retrieval import BM25, words


def test_bm25_by_hand():
    bm25 = BM25(["tin of Velmora", "tin tin tin tin tin", "silver"], k1=1.2, b=0.5)
    # Mean length 3; "velmora" is in one of three documents, of length 3.
    velmora = math.log(1 + 2.5 / 1.5) * 2.2 / (1 + 1.2)
    # "tin" is in two of three: once in 3 words, five times in 5.
    idf = math.log(1 + 1.5 / 2.5)
    first = idf * 2.2 / (1 + 1.2)
    second = idf * 5 * 2.2 / (5 + 1.2 * (0.5 + 0.5 * 5 / 3))
    np.testing.assert_allclose(bm25.scores("The TIN of? Velmora")[1:], [second, 0])
    np.testing.assert_allclose(bm25.scores("velmora, tin")[0], velmora + first)
    np.testing.assert_allclose(bm25.scores("tin tin"), 2 * bm25.scores("tin"))
    assert not bm25.scores("unheard").any()
    assert words("It's Tin-ny.") == ["it", "s", "tin", "ny"]
