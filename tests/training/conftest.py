from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}

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
    return {
        "corpus": str(tiny_corpus),
        "model": dict(MODEL),
        "head": {
            "prototypes": 48,
            "prototypes_per_token": 4,
            "initialise_at_step": 5,
            "initialise": "states",
            "detach": False,
            "position_share": 1.0,
        },
        "losses": dict(LOSSES),
        "data": {"length": 32},
        "optimizer": {"learning_rate": 3e-3, "head_learning_rate": 3e-3},
        "steps": 30,
        "batch_size": 4,
        "precision": "float32",
        "evaluation": {
            "every": 10,
            "tokens": 500,
            "final_tokens": 1000,
        },
        "checkpoint": {"every": 10},
        "logging": {"every": 4, "tensorboard": False},
    }


@pytest.fixture
def settings(same_settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A recipe of 30 steps, about 75,000 parameters, prototypes placed at step 5."""
    return deepcopy(same_settings) | {"out": str(tmp_path / "model")}
