import numpy as np
import pytest

import prismlm
from benchmarks.attribution.domain_prompts import against_controls, prompt_evidence
from benchmarks.attribution.judges.domain_share import DocumentEvidence, GroupWeights
from prismlm.corpus import Corpus
from prismlm.errors import InputError


def test_a_prompt_is_read_as_explain_reads_it(tiny_model, tiny_corpus):
    lm = prismlm.load(tiny_model)
    corpus = Corpus.open(tiny_corpus)
    documents = corpus.split("heldout")[:3]
    evidence = prompt_evidence(lm.model, lm.head, lm.logit_map, corpus, documents, 12)
    for row, document in enumerate(documents.tolist()):
        spans = corpus.spans(document)
        trace = lm.explain(corpus.text(document)[: spans[11, 1]])
        assert len(trace) == 12
        expected = np.zeros(lm.head.num_prototypes)
        for step in trace:
            for use in step.prototypes:
                expected[use.id] += max(use.evidence, 0)
        np.testing.assert_allclose(evidence.per_prototype[row], expected, rtol=1e-4, atol=1e-4)


def test_a_short_document_is_read_to_its_last_word(tiny_model, tiny_corpus):
    lm = prismlm.load(tiny_model)
    corpus = Corpus.open(tiny_corpus)
    shortest = corpus.lengths[corpus.split("all")].argmin()
    documents = np.array([shortest])
    words = int(corpus.lengths[shortest]) - 1
    whole, more = (
        prompt_evidence(lm.model, lm.head, lm.logit_map, corpus, documents, tokens)
        for tokens in (words, words + 50)
    )
    np.testing.assert_array_equal(whole.per_prototype, more.per_prototype)
    less = prompt_evidence(lm.model, lm.head, lm.logit_map, corpus, documents, words - 1)
    assert not np.array_equal(whole.per_prototype, less.per_prototype)
    with pytest.raises(InputError, match="at least 1"):
        prompt_evidence(lm.model, lm.head, lm.logit_map, corpus, documents, 0)


def test_controls_by_hand():
    keys = ["law", "physics"]
    sharp = GroupWeights(keys, np.array([[1.0, 0.0], [0.0, 1.0]]))
    blurred = GroupWeights(keys, np.full((2, 2), 0.5))
    evidence = DocumentEvidence(np.array([0, 1]), np.array([[3.0, 1.0], [0.0, 2.0]]))
    figures = against_controls((evidence, sharp), (evidence, blurred), keys, shuffles=40)
    assert figures["trained"]["own_share"] == pytest.approx((3 / 4 + 1) / 2)
    assert figures["random_states"]["own_share"] == pytest.approx(1 / 2)
    difference = figures["trained_minus_random_states"]["own_share"]
    # The two documents differ by 1/4 and 1/2: the bootstrap spans just these.
    assert difference == pytest.approx({"difference": 0.375, "low": 0.25, "high": 0.5})
    # Of two prototypes a shuffle changes both or none, so the mean lies between right and wrong.
    assert 1 - 0.875 < figures["shuffled_map"]["own_share"] < 0.875
