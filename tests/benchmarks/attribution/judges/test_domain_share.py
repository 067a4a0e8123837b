import numpy as np
import pytest

import prismlm
from benchmarks.attribution.judges.domain_share import (
    DocumentEvidence,
    GroupWeights,
    document_evidence,
    domain_share,
    paired_difference,
    shuffled,
)
from prismlm.corpus import Corpus
from prismlm.errors import InputError

WEIGHTS = GroupWeights(["law", "medicine"], np.array([[1.0, 0.0], [0.25, 0.75], [0.0, 0.0]]))


def test_hand_computed():
    evidence = DocumentEvidence(np.array([4, 9]), np.array([[3.0, 1.0, 9.0], [0.0, 2.0, 0.0]]))
    figures = domain_share(evidence, WEIGHTS, ["law", "medicine"])
    # Document 4: law (3 + 0.25)/4, medicine 0.75/4. Document 9: law 0.25, medicine 0.75.
    assert figures.own_share == pytest.approx((3.25 / 4 + 0.75) / 2)
    # All evidence: law 3.75 of 6, medicine 2.25 of 6.
    assert figures.chance == pytest.approx((3.75 / 6 + 2.25 / 6) / 2)
    assert figures.accuracy == 1.0
    assert figures.chance_accuracy == 0.5
    assert figures.documents == 2


def test_weights_of_a_lens_are_shares_of_activation(tiny_model):
    lens = prismlm.load(tiny_model).lens
    found = GroupWeights.of(lens, "domain")
    rows = lens.mass.to_pylist()
    for prototype in range(0, lens.num_prototypes, 7):
        own = [row for row in rows if row["prototype"] == prototype]
        total = sum(row["activation_sum"] for row in own) or 1.0
        for key, weight in zip(found.keys, found.weights[prototype], strict=True):
            of_key = [row["activation_sum"] for row in own if (row["domain"] or "(unknown)") == key]
            assert weight == pytest.approx(sum(of_key) / total)


def test_shuffling_moves_whole_rows():
    moved = shuffled(WEIGHTS, seed=0).weights
    assert sorted(map(tuple, moved)) == sorted(map(tuple, WEIGHTS.weights))


def test_no_domain_in_common():
    evidence = DocumentEvidence(np.array([0]), np.ones((1, 3)))
    with pytest.raises(InputError, match="domain column"):
        domain_share(evidence, WEIGHTS, ["poetry"])


def test_document_evidence_equals_explain(tiny_model, tiny_corpus):
    lm = prismlm.load(tiny_model)
    corpus = Corpus.open(tiny_corpus)
    document = next(int(d) for d in corpus.split("heldout") if 20 < corpus.lengths[d] <= 500)
    evidence = document_evidence(
        lm.model, lm.head, lm.logit_map, corpus, np.array([document]), window=512, stride=512
    )
    trace = lm.explain(corpus.text(document))
    # Explain stops before the end of text, which the corpus predicts too: leave that one out.
    expected = np.zeros(lm.head.num_prototypes)
    for step in trace[: len(trace) - 1]:
        for use in step.prototypes:
            expected[use.id] += max(use.evidence, 0)
    ids = corpus.tokens(int(corpus.starts[document]), int(corpus.lengths[document]))
    last = lm.explain(corpus.text(document))[len(trace) - 1]
    assert [step.token_id for step in trace] == ids[:-1].tolist()
    difference = evidence.per_prototype[0] - expected
    used = {use.id for use in last.prototypes}
    others = [i for i in range(lm.head.num_prototypes) if i not in used]
    np.testing.assert_allclose(difference[others], 0, atol=1e-3)


def test_paired_difference():
    left, right = {0: 1.0, 1: 0.5, 7: 9.0}, {0: 0.75, 1: 0.25, 3: 9.0}
    whole = pytest.approx({"difference": 0.25, "low": 0.25, "high": 0.25})
    assert paired_difference(left, right) == whole
    noisy = {row: float(row % 2) for row in range(100)}
    found = paired_difference(noisy, dict.fromkeys(range(100), 0.5))
    assert found["low"] < 0 < found["high"]
    # 100 differences of ±0.5 have a standard error of 0.05.
    assert found["high"] - found["low"] == pytest.approx(4 * 0.05, rel=0.1)
    with pytest.raises(InputError, match="share no document"):
        paired_difference({0: 1.0}, {1: 1.0})
