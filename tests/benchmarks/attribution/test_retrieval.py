"""The baselines that attribution is compared with."""

import math

import numpy as np
import torch

import prismlm
from benchmarks.attribution.retrieval import BM25, nearest_cosines, words
from prismlm.corpus import Corpus


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


def test_nearest_cosines_are_those_of_every_position(tiny_model, tiny_corpus):
    lm = prismlm.load(tiny_model)
    corpus = Corpus.open(tiny_corpus)
    documents = corpus.split("train")[[5, 2, 9]]
    traces = [lm.explain(corpus.text(int(document))[:300]) for document in documents]
    states = torch.stack([trace.table.states[7] for trace in traces])
    found = nearest_cosines(
        lm.model, corpus, documents, states, window=512, stride=384, tokens_per_batch=2048
    )
    whole = [lm.explain(corpus.text(int(d))).table.states for d in documents]
    assert max(corpus.lengths[documents]) <= 512, "a document is longer than a window"
    expected = torch.stack([(states @ z.T).amax(1) for z in whole], 1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    # Each state stands in its own document.
    np.testing.assert_allclose(np.diag(found), 1, atol=1e-4)
