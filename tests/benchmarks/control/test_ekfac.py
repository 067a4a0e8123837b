"""What goes to bergson, and what comes back."""

import json

import numpy as np

from benchmarks.control import ekfac


class TwoAnswers:
    def alone(self, number):
        return [[1, 2], [1, 2, 3]][number], [[7], [8, 9]][number]


def test_loss_is_of_the_answers_alone(tmp_path):
    ekfac.write_rows(tmp_path / "rows.jsonl", TwoAnswers(), 2)
    first, second = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert first == {"input_ids": [1, 2, 7], "labels": [-100, -100, 7], "length": 3}
    assert second["labels"] == [-100, -100, -100, 8, 9]


def test_scores_are_of_documents_by_questions(tmp_path):
    """As bergson 2.5.1 writes them: a score and whether it was written, question by question."""
    names = ["score_0", "written_0", "score_1", "written_1"]
    info = {"num_scores": 2, "num_rows": 3}
    kind = {"names": names, "formats": ["float32", "bool"] * 2, "offsets": [0, 4, 8, 12]}
    kind["itemsize"] = 16
    rows = np.zeros(3, dtype=kind)
    for n in range(2):
        rows[f"score_{n}"], rows[f"written_{n}"] = 10 * n + np.arange(3), True
    rows.tofile(tmp_path / "scores.bin")
    (tmp_path / "info.json").write_text(json.dumps(info | {"dtype": kind}))
    assert ekfac.read_scores(tmp_path).tolist() == [[0, 10], [1, 11], [2, 12]]
