"""Training runs in this process and in others, stopped on the way, and compared."""

import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from prismlm.training import LossWeights
from prismlm.training.trainer import latest_checkpoint
from tests.helpers import forked


def weights(directory):
    return load_file(directory / "model.safetensors") | load_file(
        directory / "prototype_head.safetensors"
    )


def curve(history):
    """Return a history without means since the last log, which start anew when a run is resumed."""
    free = {"loss", "ce", *LossWeights.model_fields}
    return [{k: v for k, v in row.items() if k not in free} for row in history]


def assert_same_run(first, second):
    a, b = weights(first), weights(second)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def start(settings, tmp_path, steps):
    """Start a run in a process of its own and wait until it has written a checkpoint."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings | {"steps": steps, "checkpoint": {"every": 1}}))
    process = forked.start("train", path)
    checkpoints = Path(settings["out"]) / "checkpoints"
    deadline = time.monotonic() + 240
    while latest_checkpoint(checkpoints) is None:
        assert process.poll() is None, process.communicate(timeout=1)[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, path, checkpoints
