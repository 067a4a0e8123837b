"""The choice of a temperature, and differences prediction by prediction, by hand."""

import numpy as np

from benchmarks.pages.retraining import best_choice
from benchmarks.shared.figures import paired


def test_the_choice_is_made_on_the_half_to_choose_on():
    def judged(search, everything):
        return {"search": {"mean": search}, "all": {"mean": everything}}

    tried = {
        "evidence T=0.1 cells=16": judged(0.3, 0.1),
        "evidence T=0.2 cells=16": judged(0.2, 0.9),
        # Controls: of other documents with the token, and no evidence at all.
        "evidence T=0.2 cells=16 same=1": judged(0.9, 0.9),
        "bm25": judged(0.9, 0.9),
    }
    assert best_choice({"methods": tried}) == "evidence T=0.1 cells=16"


def test_differences_are_paired():
    left = np.array([1.0, 2.0, 4.0])
    assert paired(left, left - 1) == {"mean": 1.0, "error": 0.0}
