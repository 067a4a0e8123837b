import json

import numpy as np
import pytest

from benchmarks.attribution.datamodels import (
    named,
    resampled,
    trained_on,
    tried_choices,
)
from benchmarks.attribution.methods.evidence import Choices


def test_every_choice_has_a_name_of_its_own():
    tried = tried_choices()
    assert len({named(choices) for choices in tried}) == len(set(tried)) == len(tried)
    assert named(Choices(0.1, cells=None)) == "evidence T=0.1 cells=all"


def test_models_are_trained_on_what_they_do_not_leave_out(tmp_path):
    (tmp_path / "subsets.json").write_text(json.dumps([[0, 2], [1], [2]]))
    # Of three models that are planned, two are there.
    assert trained_on(tmp_path, 2, 3).tolist() == [[False, True, False], [True, False, True]]


def test_what_foretells_everything_does_so_for_any_predictions_and_models():
    generator = np.random.default_rng(0)
    subsets = generator.random((30, 20)) < 0.5
    scores = generator.normal(size=(5, 20))
    outputs = scores @ subsets.T
    again = resampled(scores, subsets, outputs)
    # Equals of a model that is drawn twice may be rounded apart.
    assert again == pytest.approx([1.0] * len(again), abs=0.01)
    apart = resampled(generator.normal(size=(5, 20)), subsets, outputs)
    assert len(set(apart)) > 1
    assert abs(np.mean(apart)) < 0.4
