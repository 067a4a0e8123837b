"""A search small enough to be run again and again."""

RATES = {"low": 1e-3, "high": 3e-2, "log": True}
SPACE = {"batch_size": [4, 8], "optimizer.learning_rate": RATES}


def settings_of(corpus, out):
    """Three trials of two seeds, a thousand tokens each, of a model of 40,000 parameters."""
    return {
        "corpus": str(corpus),
        "out": str(out),
        "model": {"preset": "protot-tiny", "hidden_size": 16, "num_channels": 4},
        "head": {"enabled": False, "prototypes": 16, "prototypes_per_token": 2},
        "data": {"length": 32},
        "steps": 8,
        "batch_size": 4,
        "precision": "float32",
        "evaluation": {"every": 0, "tokens": 300, "final_tokens": 300},
        "checkpoint": {"every": 2},
        "logging": {"every": 4, "tensorboard": False},
        "search": {"trials": 3, "startup_trials": 2, "seeds": 2, "space": SPACE},
    }


def with_search(settings, **changes):
    return settings | {"search": settings["search"] | changes}
