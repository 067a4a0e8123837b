import numpy as np
import pytest

from benchmarks.attribution.judges.passage_domains import passage_domain_share
from prismlm.errors import InputError


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


def test_nothing_to_compare():
    with pytest.raises(InputError, match="domain column"):
        passage_domain_share(np.ones((1, 1)), ["law"], ["code"])
    with pytest.raises(InputError, match="each column"):
        passage_domain_share(np.ones((1, 2)), ["law"], ["law"])
