import numpy as np

from benchmarks.attribution.judges.passage_recall import document_recall


def test_recall_by_hand():
    scores = np.array([[3.0, 1.0, 2.0, 0.5], [0.0, 0.0, 1.0, -1.0]])
    # The two best of the first are 0 and 2; of the second 2 alone has a score.
    found = document_recall(scores, [np.array([0, 1, 3]), np.array([0])], limit=2)
    assert found.tolist() == [0.5, 0.0]
    assert document_recall(scores[:1], [np.array([2, 3])], limit=1).tolist() == [0.0]
