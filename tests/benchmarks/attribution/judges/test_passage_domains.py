import numpy as np
import pytest

from benchmarks.attribution.judges.passage_domains import paired_difference, passage_domain_share


def test_share_and_accuracy_by_hand():
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
    assert found.chance_accuracy == 0.5


def test_paired_difference():
    left, right = {0: 1.0, 1: 0.5, 7: 9.0}, {0: 0.75, 1: 0.25, 3: 9.0}
    whole = pytest.approx({"difference": 0.25, "low": 0.25, "high": 0.25})
    assert paired_difference(left, right) == whole
    noisy = {row: float(row % 2) for row in range(100)}
    found = paired_difference(noisy, dict.fromkeys(range(100), 0.5))
    assert found["low"] < 0 < found["high"]
    # 100 differences of ±0.5 have a standard error of 0.05.
    assert found["high"] - found["low"] == pytest.approx(4 * 0.05, rel=0.1)
