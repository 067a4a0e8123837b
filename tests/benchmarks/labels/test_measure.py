"""BERTopic's weights of words, by hand."""

import numpy as np
import pytest
from scipy import sparse

from benchmarks.labels.measure import class_tf_idf


def test_class_tf_idf_by_hand():
    """Two cells of 4 and 2 words: A = 3; the words are there 4, 1 and 1 times."""
    count = sparse.csr_matrix(np.array([[3, 1, 0], [1, 0, 1], [0, 0, 0]], np.float32))
    weights = class_tf_idf(count, np.array([4, 2, 0])).toarray()
    expected = [
        [0.75 * np.log(1 + 3 / 4), 0.25 * np.log(1 + 3 / 1), 0],
        [0.5 * np.log(1 + 3 / 4), 0, 0.5 * np.log(1 + 3 / 1)],
        [0, 0, 0],
    ]
    assert weights == pytest.approx(np.array(expected), rel=1e-6)
