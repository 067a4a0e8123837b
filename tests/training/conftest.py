from copy import deepcopy

import pytest

from tests.helpers.spread_runs import base_settings


@pytest.fixture(scope="session")
def same_settings(tiny_corpus):
    """`settings` without the output directory; not to be modified."""
    # The source's losses alone, rising to a small weight.
    losses = dict.fromkeys(("prototype_pull", "point_pull", "residual"), 0.1)
    losses |= {"prototype_only_kl": 0.0, "warmup": 0.6}
    changes = {"model.num_hidden_layers": 1, "model.attention_dropout": 0.1, "losses": losses}
    changes |= {"head.initialise": "states", "head.initialise_at_step": 5, "steps": 30}
    changes |= {"evaluation.every": 10, "checkpoint.every": 10, "logging.every": 4}
    return base_settings(tiny_corpus, changes)


@pytest.fixture
def settings(same_settings, tmp_path):
    """A recipe of 30 steps, about 75,000 parameters, prototypes placed at step 5."""
    return deepcopy(same_settings) | {"out": str(tmp_path / "model")}
