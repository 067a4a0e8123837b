"""Passages, and the judges of what methods name, by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.attribution.judges.passage_domains import paired_difference, passage_domain_share
from benchmarks.attribution.judges.passages import (
    PassageBank,
    Prediction,
    answer_predictions,
    answer_scores,
    document_recall,
)
from benchmarks.attribution.judges.retraining import (
    forgetting,
    linear_datamodeling,
    random_subsets,
)
from benchmarks.attribution.judges.tail_patch import tail_patch
from benchmarks.attribution.retrieval import BM25
from benchmarks.shared.over_seeds import mean_with_error


def test_documents_are_cut_evenly():
    length = np.array([5, 3, 9])
    corpus = SimpleNamespace(lengths=length, starts=np.cumsum(length) - length)
    # The second document is left out; 9 tokens in pieces of at most 4 are 3 × 3.
    bank = PassageBank.of(corpus, np.array([0, 2]), tokens=4)
    assert bank.first.tolist() == [0, 2, 8, 11, 14]
    assert bank.length.tolist() == [2, 3, 3, 3, 3]
    positions = np.array([0, 1, 2, 4, 5, 7, 8, 16, 17])
    assert bank.passage_at(positions).tolist() == [0, 0, 1, 1, -1, -1, 2, 4, -1]
    scores = np.array([[1, 2, 4, 8, 16], [0, 0, -1, 0, 3]], dtype=np.float32)
    assert bank.by_document(scores).tolist() == [[3, 28], [0, 2]]
    assert bank.by_document(scores, best=True).tolist() == [[2, 16], [0, 3]]


def test_answers_are_predicted_token_by_token_and_joined_alike():
    first, second = answer_predictions([7, 8], [9, 10])
    assert (first.ids.tolist(), first.target) == ([7, 8], 9)
    assert (second.ids.tolist(), second.target) == ([7, 8, 9], 10)
    scores = np.array([[1, 3, 0], [0, 0, 8], [0, 0, 0], [-1, 0, 1]], dtype=np.float32)
    expected = [[0.25, 0.75, 1.0], [-0.5, 0, 0.5]]
    np.testing.assert_allclose(answer_scores(scores, np.array([0, 0, 0, 1])), expected)


def test_recall_by_hand():
    scores = np.array([[3.0, 1.0, 2.0, 0.5], [0.0, 0.0, 1.0, -1.0]])
    # The two best of the first are 0 and 2; of the second 2 alone has a score.
    found = document_recall(scores, [np.array([0, 1, 3]), np.array([0])], limit=2)
    assert found.tolist() == [0.5, 0.0]
    # Of a sample the variance is 20 / 3, of a mean of four a quarter of that.
    error = {"mean": 4, "error": pytest.approx(np.sqrt(20 / 12))}
    assert mean_with_error(np.array([1.0, 3.0, 5.0, 7.0])) == error


def test_domains_by_hand():
    # Law has two passages. Shares of law: 0.5, 0.9, 0.8; their mean is 2.2 / 3.
    scores = np.array([[1, 4, 5, -9], [9, 0, 1, 0], [4, 4, 2, 0], [0, 0, 0, 0]], dtype=float)
    found = passage_domain_share(
        scores, ["law", "law", "code", "code"], ["code", "law", "code", "law"]
    )
    assert found.documents == 3  # the last has no score
    assert found.own_share == pytest.approx((0.5 + 0.9 + 0.2) / 3)
    assert found.chance == pytest.approx((0.8 + 2.2 + 0.8) / 9)
    # Lifts of law and code: 0.68 and 1.88, 1.23 and 0.38, 1.09 and 0.75.
    assert found.hits == {0: True, 1: True, 2: False}
    found = paired_difference({0: 1.0, 1: 0.5, 7: 9.0}, {0: 0.75, 1: 0.25, 3: 9.0})
    assert found == pytest.approx({"difference": 0.25, "low": 0.25, "high": 0.25})


def test_lds_by_hand():
    subsets = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=bool)
    scores = np.array([[1, 2, 4], [0, 0, 0]])
    # Summed over the subsets: 3, 6, 5.
    outputs = np.array([[-3.0, -1.0, -2.0], [-1.0, -2.0, -3.0]])
    assert linear_datamodeling(scores, subsets, outputs).tolist() == pytest.approx([1, 0])
    subsets = random_subsets(10, 6, seed=3)
    assert subsets.sum(1).tolist() == [5] * 6
    assert len({row.tobytes() for row in subsets}) > 1


def test_what_is_forgotten_is_what_the_missing_documents_gave():
    gave = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])

    def train(rows, seed):
        return lambda asked: np.array([gave[p.target, rows].sum() * seed for p in asked])

    asked = [Prediction(np.array([0]), target) for target in (0, 1)]
    lost = forgetting(train, 3, asked, np.array([[0, 2], [1, 2]]), seeds=(1, 10))
    assert lost.tolist() == [[5, 50], [48, 480]]
    # One model without 0, 1 and 2 has nothing left of either.
    lost = forgetting(train, 3, asked, np.array([[0, 2], [1, 2]]), seeds=(1,), together=2)
    assert lost.tolist() == [[7], [56]]


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


class Bigram(nn.Module):
    """Logits of the next token are a row of a table, so that gradients are those of a softmax."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table))

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.table[input_ids])


def test_one_step_by_hand():
    model = Bigram([[0.0, 0.0], [0.0, 0.0]])
    asked = Prediction(np.array([1, 0]), 1)
    # 0→1, 0→1, 1→0: of three tokens two are after 0. The gradient of row 0 is
    # 2/3 · (softmax − one-hot) = 2/3 · (½, −½), so that a step of 0.3 makes it (−0.1, 0.1).
    passages = [np.array([0, 1]), np.array([0, 1, 0]), np.array([1])]
    expected = 0.1 - math.log(math.exp(-0.1) + math.exp(0.1)) - math.log(0.5)
    # The second prediction starts from the same weights, and its passage says nothing of row 0.
    found = tail_patch(model, [asked, asked], [passages, [np.array([1, 0])]], learning_rate=0.3)
    np.testing.assert_allclose(found.gain, [expected, 0], atol=1e-6)
    assert not model.table.any()


def test_what_is_raised_everywhere_is_not_specific():
    model = Bigram([[0.0, 0.0], [0.5, -2.0]])
    asked = Prediction(np.array([1, 0]), 1)
    # One step of 1: row 0 moves by ½ · (−½, ½), row 1 by ½ · (−σ(2.5), σ(2.5)). Log-odds of the
    # second of two tokens are the difference of the logits.
    here, there = 0.5, 1 / (1 + math.exp(-2.5))
    lists, contexts = [[np.array([0, 1]), np.array([1, 1])]], [np.array([1]), np.array([0])]
    found = tail_patch(model, [asked], lists, contexts=contexts, learning_rate=1.0)
    assert found.gain[0] == pytest.approx(math.log(1 / (1 + math.exp(-0.5))) - math.log(0.5))
    assert found.specific[0] == pytest.approx(here - (there + here) / 2, rel=1e-5)
