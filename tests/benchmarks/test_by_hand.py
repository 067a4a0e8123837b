"""Statistics of the pages, by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import sparse

from benchmarks.attribution import domains
from benchmarks.attribution.datamodels import resampled
from benchmarks.control import ekfac, what_if_judged
from benchmarks.labels.measure import class_tf_idf
from benchmarks.pages.retraining import best_choice
from benchmarks.prototype_mixer import channels
from benchmarks.shared import turns
from benchmarks.shared.over_seeds import differences, interval, paired
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
