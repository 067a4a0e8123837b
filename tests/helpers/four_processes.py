"""Four processes that share models: python four_processes.py DIR does the jobs of jobs.pickle."""

import pickle
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from prismlm.errors import InputError, Interrupted
from prismlm.models.presets import build_config, build_model
from prismlm.training import build_recipe, parallel, train
from prismlm.training.parallel import Sharding
from prismlm.training.setup import prepare
from prismlm.training.trainer import latest_checkpoint
from tests.helpers.runs import InterruptAfter
from tests.helpers.two_processes import fork


def initial_of(settings):
    """Return the weights of a model that is built by shards, and the largest share of a process."""
    sharding = Sharding(init_device_mesh("cpu", (parallel.world_size(),)))
    torch.manual_seed(3)
    model = sharding.build(lambda: build_model(build_config(settings, 50, 0)))
    drawn = torch.rand(1).item()
    whole = sum(p.numel() for p in model.parameters())
    assert all(p.is_meta for p in model.parameters())
    sharding.apply(model)
    share = sum(p.to_local().numel() for p in model.parameters()) / whole
    weights = {name: parallel.full(value) for name, value in model.state_dict().items()}
    weights |= dict(model.named_buffers())
    return {"drawn": drawn, "share": share, "weights": weights}


def main(directory):
    torch.set_num_threads(1)
    parallel.join()
    jobs = pickle.loads((directory / "jobs.pickle").read_bytes())
    results = {name: initial_of(settings) for name, settings in jobs["initial"].items()}
    for name, settings, stop_at, resume in jobs["runs"]:
        recipe = build_recipe(settings)
        if name == "hsdp":
            decoder = prepare(recipe).model.model
            results["prepared"] = all(isinstance(p, DTensor) for p in decoder.parameters())
        try:
            result = train(recipe, resume=resume, progress=InterruptAfter(stop_at))
            results[name] = (result.history, result.quality)
        except Interrupted:
            results[name] = latest_checkpoint(recipe.out / "checkpoints").name
        except InputError as error:
            results[name] = str(error)
    (directory / f"rank-{parallel.rank()}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), main, processes=4))
