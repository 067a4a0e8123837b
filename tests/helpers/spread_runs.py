"""Runs in two processes that are compared with those in one."""

import pickle
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType

import pytest

from prismlm.training.recipe import set_value
from tests.helpers import forked

RATES = {"learning_rate", "step", "tokens", "loss_scale", "eval_tokens", "final_tokens"}
# Half a step left at the end of an epoch counts in it where passes follow one another.
UNLIKE = {"epoch"}

# Each process's micro-batches, as the data loader deals them out: [first, second].
ONE_PASS = [[(0, 4)], [(4, 8)]]
TWO_PASSES = [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]


def launch(directory, jobs, processes=2):
    """Have processes do jobs, see processes.py; return the results of each, by rank."""
    (directory / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    script = Path(__file__).with_name("processes.py")
    done = forked.run_script(script, directory, processes)
    assert done.returncode == 0, done.stderr
    files = [directory / f"rank-{rank}.pickle" for rank in range(processes)]
    return [pickle.loads(file.read_bytes()) for file in files]


def base_settings(corpus, changes=MappingProxyType({})):
    """Twelve steps without dropout, which differs between the processes."""
    settings = {
        "corpus": str(corpus),
        "model": {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
        },
        "head": {
            "prototypes": 48,
            "prototypes_per_token": 4,
            "initialise_at_step": 3,
            "detach": False,
            "position_share": 1.0,
        },
        "losses": {"prototype_pull": 1.0, "residual": 1.0, "diversity": 0.5, "warmup": 0.5},
        "data": {"length": 32},
        "optimizer": {"learning_rate": 3e-3, "head_learning_rate": 3e-3},
        "steps": 12,
        "batch_size": 4,
        "precision": "float32",
        "evaluation": {"every": 5, "tokens": 500, "final_tokens": 1000},
        "checkpoint": {"every": 6},
        "logging": {"every": 2, "tensorboard": False},
    }
    return with_values(settings, changes)


def with_values(settings, changes):
    """Return settings of a recipe with other values, by dotted key."""
    settings = deepcopy(settings)
    for key, value in changes.items():
        set_value(settings, key, deepcopy(value), "a test")
    return settings


def assert_same_history(expected, actual):
    assert [row["step"] for row in actual] == [row["step"] for row in expected]
    for theirs, ours in zip(expected, actual, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() - UNLIKE:
            # The norm of a large gradient is summed in float32, in another order.
            tolerance = 0 if name in RATES else 5e-5 if name.endswith("grad_norm") else 1e-5
            # Figures of layers.
            tolerance = 1e-4 if "/" in name else tolerance
            # Of a KL of a thousandth, float32 leaves fewer digits.
            expected_here = pytest.approx(theirs[name], rel=tolerance, abs=tolerance * 1e-2)
            assert ours[name] == expected_here, (name, ours["step"])
