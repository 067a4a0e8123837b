"""Statistics of the pages, and judges of what methods name, by hand."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import sparse
from torch import nn

from benchmarks.attribution import domains
from benchmarks.attribution.datamodels import resampled
from benchmarks.attribution.judges import passages, retraining
from benchmarks.attribution.judges.passage_domains import paired_difference, passage_domain_share
from benchmarks.attribution.judges.tail_patch import tail_patch
from benchmarks.attribution.retrieval import BM25
from benchmarks.control import ekfac, what_if_judged
from benchmarks.labels.measure import class_tf_idf
from benchmarks.pages.retraining import best_choice
from benchmarks.prototype_mixer import channels
from benchmarks.shared import turns
from benchmarks.shared.over_seeds import differences, interval, mean_with_error, paired
from prismlm.files import write_json


def test_the_interval_over_seeds():
    # Mean 2, deviation 1, over three: 2 ± 4.3027 / √3, at a level of 0.01 2 ± 9.9248 / √3.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert interval([1.0, 2.0, 3.0], 0.01) == pytest.approx((2 - 5.73009, 2 + 5.73009), abs=1e-4)
    assert paired([1.0, 2.0, 5.0], [0.0, 1.0, 1.0]) == {"mean": 2, "error": pytest.approx(1.0)}


def seeds(*values):
    return dict(enumerate(values))


def test_differences_over_seeds():
    """A sign in every seed is not enough, and the interval is corrected for the table's rows."""
    (found,) = differences([(seeds(1.0, 2.0, 3.0), seeds(1.5, 2.25, 4.0))])
    assert (found.sign, "**" in found.shown()) == (0, False)
    (found,) = differences([(seeds(1.0, 2.0, 3.0), seeds(1.5, 2.51, 3.49))])
    assert (found.sign, found.shown("+.1f")) == (-1, "**-0.5 (-0.5 to -0.5)**")
    # The seeds that one side alone has do not count, and one is never enough.
    (found,) = differences([({0: 1.0, 5: 2.0}, {0: 3.0, 7: 4.0})])
    assert (found.sign, found.shown()) == (0, "-2.0000 (1 seed)")
    # t = 8.66 on two degrees: past 4.30, and short of the 14.09 of ten rows.
    one = seeds(0.0, 0.0, 0.0), seeds(0.4, 0.5, 0.6)
    assert differences([one])[0].sign == -1
    assert differences([one] * 10)[0].sign == 0
    # Rows of one seed test nothing.
    assert differences([one, *[({0: 0.0}, {0: 1.0})] * 9])[0].sign == -1


def test_ratios_of_times():
    assert turns.ratios([2, 6, 4], [1, 2, 2]) == {"ratio": 2, "low": 2, "high": 3}


def test_class_tf_idf():
    """Two cells of 4 and 2 words: A = 3; the words are there 4, 1 and 1 times."""
    count = sparse.csr_matrix(np.array([[3, 1, 0], [1, 0, 1], [0, 0, 0]], np.float32))
    weights = class_tf_idf(count, np.array([4, 2, 0])).toarray()
    expected = [
        [0.75 * np.log(1 + 3 / 4), 0.25 * np.log(1 + 3 / 1), 0],
        [0.5 * np.log(1 + 3 / 4), 0, 0.5 * np.log(1 + 3 / 1)],
        [0, 0, 0],
    ]
    assert weights == pytest.approx(np.array(expected), rel=1e-6)


def test_the_chance_of_the_ranks():
    good = [{"effects": [{"rank": rank}]} for rank in (1, 1, 2)]
    # Ranks from the top: 0, 0 and 1 of 5: 1 way for all at the top, 3 with one second, of 216.
    assert channels.overall(good, 5) == pytest.approx(4 / 216)


def test_what_foretells_everything_does_so_for_any_predictions_and_models():
    generator = np.random.default_rng(0)
    subsets, scores = generator.random((30, 20)) < 0.5, generator.normal(size=(5, 20))
    again = resampled(scores, subsets, scores @ subsets.T)
    # Equals of a model that is drawn twice may be rounded apart.
    assert again == pytest.approx([1.0] * len(again), abs=0.01)
    assert (
        abs(np.mean(resampled(generator.normal(size=(5, 20)), subsets, scores @ subsets.T))) < 0.4
    )


def test_the_choice_is_made_on_the_half_to_choose_on():
    tried = {
        "evidence T=0.1 cells=16": (0.3, 0.1),
        "evidence T=0.2 cells=16": (0.2, 0.9),
        # Controls: of other documents with the token, and no evidence at all.
        "evidence T=0.2 cells=16 same=1": (0.9, 0.9),
        "bm25": (0.9, 0.9),
    }
    methods = {n: {"search": {"mean": s}, "all": {"mean": a}} for n, (s, a) in tried.items()}
    assert best_choice({"methods": methods}) == "evidence T=0.1 cells=16"


def test_a_factor_and_a_line_are_fitted_to_changes():
    size = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    # Least squares: Σxy / Σx² = 58 / 55. The last column is not of the fitted half.
    true = np.array([[1.0, 2.0, 4.0, 4.0, 5.0, 99.0]])
    bank = SimpleNamespace(true=true, fitted=np.arange(5))
    factor, error = what_if_judged.fitted(lambda c: c * np.append(size, 1.0)[None], bank)
    assert factor == pytest.approx(58 / 55, abs=1e-3)
    assert error == pytest.approx(((factor * size - true[0, :5]) ** 2).mean())
    # A quantile is not moved by how far off what is beyond it lies.
    off = 1 + 2 * size + np.array([0, 50, 0, 0, 0])
    assert what_if_judged.quantile_line(size, off, 0.5) == [1.0, 2.0]
    assert what_if_judged.quantile_line(size, 3 * size, 0.95) == [0.0, 3.0]


def test_domains_of_a_token_are_those_of_its_places():
    corpus = SimpleNamespace(
        column=lambda _: ["law", None, "sea"],
        lengths=[3, 1, 2],
        num_tokens=6,
        tokenizer=range(5),
        tokens=lambda *_: np.array([1, 1, 2, 3, 1, 3]),
    )
    found = domains.domains_of_tokens(corpus, ["law", "sea"])
    assert found == pytest.approx(np.array([[0, 0], [2 / 3, 1 / 3], [1, 0], [0, 1], [0, 0]]))
    kinds = ["law", "sea", "law", "law"]
    pairs = domains.pairs_of(kinds)
    assert [second for _, second in pairs] == [0, 1, 2, 3]
    assert all(kinds[first] != kinds[second] for first, second in pairs)


def test_bergson_has_the_loss_of_the_answers_alone(tmp_path):
    documents = SimpleNamespace(alone=lambda n: ([1, 2, 3][: n + 2], [[7], [8, 9]][n]))
    ekfac.write_rows(tmp_path / "rows.jsonl", documents, 2)
    first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert first == {"input_ids": [1, 2, 7], "labels": [-100, -100, 7], "length": 3}
    assert second["labels"] == [-100, -100, -100, 8, 9]


def test_scores_of_bergson_are_of_documents_by_questions(tmp_path):
    """As bergson 2.5.1 writes them: a score and whether it was written, question by question."""
    names = ["score_0", "written_0", "score_1", "written_1"]
    kind = {"names": names, "formats": ["float32", "bool"] * 2, "offsets": [0, 4, 8, 12]}
    kind["itemsize"] = 16
    rows = np.zeros(3, dtype=kind)
    for n in range(2):
        rows[f"score_{n}"], rows[f"written_{n}"] = 10 * n + np.arange(3), True
    rows.tofile(tmp_path / "scores.bin")
    write_json(tmp_path / "info.json", {"num_scores": 2, "num_rows": 3, "dtype": kind})
    assert ekfac.read_scores(tmp_path).tolist() == [[0, 10], [1, 11], [2, 12]]


def test_documents_are_cut_evenly():
    length = np.array([5, 3, 9])
    corpus = SimpleNamespace(lengths=length, starts=np.cumsum(length) - length)
    # The second document is left out; 9 tokens in pieces of at most 4 are 3 × 3.
    bank = passages.PassageBank.of(corpus, np.array([0, 2]), tokens=4)
    assert bank.first.tolist() == [0, 2, 8, 11, 14]
    assert bank.length.tolist() == [2, 3, 3, 3, 3]
    positions = np.array([0, 1, 2, 4, 5, 7, 8, 16, 17])
    assert bank.passage_at(positions).tolist() == [0, 0, 1, 1, -1, -1, 2, 4, -1]
    scores = np.array([[1, 2, 4, 8, 16], [0, 0, -1, 0, 3]], dtype=np.float32)
    assert bank.by_document(scores).tolist() == [[3, 28], [0, 2]]
    assert bank.by_document(scores, best=True).tolist() == [[2, 16], [0, 3]]


def test_answers_are_predicted_token_by_token_and_joined_alike():
    first, second = passages.answer_predictions([7, 8], [9, 10])
    assert (first.ids.tolist(), first.target) == ([7, 8], 9)
    assert (second.ids.tolist(), second.target) == ([7, 8, 9], 10)
    scores = np.array([[1, 3, 0], [0, 0, 8], [0, 0, 0], [-1, 0, 1]], dtype=np.float32)
    expected = [[0.25, 0.75, 1.0], [-0.5, 0, 0.5]]
    np.testing.assert_allclose(passages.answer_scores(scores, np.array([0, 0, 0, 1])), expected)


def test_recall_by_hand():
    scores = np.array([[3.0, 1.0, 2.0, 0.5], [0.0, 0.0, 1.0, -1.0]])
    # The two best of the first are 0 and 2; of the second 2 alone has a score.
    found = passages.document_recall(scores, [np.array([0, 1, 3]), np.array([0])], limit=2)
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
    found = retraining.linear_datamodeling(scores, subsets, outputs)
    assert found.tolist() == pytest.approx([1, 0])
    subsets = retraining.random_subsets(10, 6, seed=3)
    assert subsets.sum(1).tolist() == [5] * 6
    assert len({row.tobytes() for row in subsets}) > 1


def test_what_is_forgotten_is_what_the_missing_documents_gave():
    gave = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])

    def train(rows, seed):
        return lambda asked: np.array([gave[p.target, rows].sum() * seed for p in asked])

    asked = [passages.Prediction(np.array([0]), target) for target in (0, 1)]
    missing = np.array([[0, 2], [1, 2]])
    lost = retraining.forgetting(train, 3, asked, missing, seeds=(1, 10))
    assert lost.tolist() == [[5, 50], [48, 480]]
    # One model without 0, 1 and 2 has nothing left of either.
    lost = retraining.forgetting(train, 3, asked, missing, seeds=(1,), together=2)
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
    asked = passages.Prediction(np.array([1, 0]), 1)
    # 0→1, 0→1, 1→0: of three tokens two are after 0. The gradient of row 0 is
    # 2/3 · (softmax − one-hot) = 2/3 · (½, −½), so that a step of 0.3 makes it (−0.1, 0.1).
    named = [np.array([0, 1]), np.array([0, 1, 0]), np.array([1])]
    expected = 0.1 - math.log(math.exp(-0.1) + math.exp(0.1)) - math.log(0.5)
    # The second prediction starts from the same weights, and its passage says nothing of row 0.
    found = tail_patch(model, [asked, asked], [named, [np.array([1, 0])]], learning_rate=0.3)
    np.testing.assert_allclose(found.gain, [expected, 0], atol=1e-6)
    assert not model.table.any()


def test_what_is_raised_everywhere_is_not_specific():
    model = Bigram([[0.0, 0.0], [0.5, -2.0]])
    asked = passages.Prediction(np.array([1, 0]), 1)
    # One step of 1: row 0 moves by ½ · (−½, ½), row 1 by ½ · (−σ(2.5), σ(2.5)). Log-odds of the
    # second of two tokens are the difference of the logits.
    here, there = 0.5, 1 / (1 + math.exp(-2.5))
    lists, contexts = [[np.array([0, 1]), np.array([1, 1])]], [np.array([1]), np.array([0])]
    found = tail_patch(model, [asked], lists, contexts=contexts, learning_rate=1.0)
    assert found.gain[0] == pytest.approx(math.log(1 / (1 + math.exp(-0.5))) - math.log(0.5))
    assert found.specific[0] == pytest.approx(here - (there + here) / 2, rel=1e-5)
