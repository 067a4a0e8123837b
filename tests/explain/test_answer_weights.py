"""What counts in a whole answer, by hand."""

import numpy as np
import pytest

from prismlm.explain.answer_weights import LEAST, token_weights


def test_a_token_counts_by_what_it_tells():
    rates = np.exp([-2.0, -5.0, -7.0])
    found = token_weights(rates, 10**6, common=5.0)
    assert found == pytest.approx([LEAST, LEAST, LEAST + 4])
    # What never comes next counts as half a position: in a small corpus that says little.
    telling = np.log(2e4) - 5
    assert token_weights(np.zeros(1), 10**4)[0] == pytest.approx(LEAST + telling**2)
    assert token_weights(np.zeros(1), 50) == pytest.approx([LEAST])
