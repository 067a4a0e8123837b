from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.spread_runs import base_settings

# The source's losses alone, rising to a small weight.
LOSSES = {
    "prototype_pull": 0.1,
    "point_pull": 0.1,
    "residual": 0.1,
    "prototype_only_kl": 0.0,
    "warmup": 0.6,
}


@pytest.fixture(scope="session")
def same_settings(tiny_corpus: Path) -> dict[str, Any]:
    """`settings` without the output directory; not to be modified."""
    settings = base_settings(tiny_corpus)
    settings["model"] |= {"num_hidden_layers": 1, "attention_dropout": 0.1}
    settings["head"] |= {"initialise": "states", "initialise_at_step": 5}
    settings["evaluation"]["every"] = settings["checkpoint"]["every"] = 10
    settings["logging"]["every"] = 4
    return settings | {"losses": dict(LOSSES), "steps": 30}


@pytest.fixture
def settings(same_settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A recipe of 30 steps, about 75,000 parameters, prototypes placed at step 5."""
    return deepcopy(same_settings) | {"out": str(tmp_path / "model")}
