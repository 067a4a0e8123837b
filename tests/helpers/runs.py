"""Training runs in this process and in others, stopped on the way, and compared."""

from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from prismlm.training import LossWeights
from prismlm.training.trainer import latest_checkpoint
from tests.helpers import forked
from tests.helpers.interrupted import wait_for


def curve(history):
    """Return a history without means since the last log, which start anew when a run is resumed."""
    free = {"loss", "ce", *LossWeights.model_fields}
    return [{k: v for k, v in row.items() if k not in free} for row in history]


def assert_same_run(first, second):
    for name in ("model", "prototype_head"):
        a, b = (load_file(directory / f"{name}.safetensors") for directory in (first, second))
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def start(settings, tmp_path, steps):
    """Start a run in a process of its own and wait until it has written a checkpoint."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings | {"steps": steps, "checkpoint": {"every": 1}}))
    process, checkpoints = forked.start("train", path), Path(settings["out"]) / "checkpoints"

    def begun():
        assert process.poll() is None, process.communicate(timeout=1)[1]
        return latest_checkpoint(checkpoints)

    wait_for(begun, seconds=240)
    return process, path, checkpoints
