"""What torchrun runs: python -m torch.distributed.run --nproc-per-node 2 two_processes.py DIR."""

import pickle
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from prismlm.training import TrainingInterrupted, build_recipe, distributed, train
from prismlm.training.step import Step
from runs import InterruptAfter
from tiny_head import make


def gradients_of(model, batches, reduce=lambda tensor: tensor, positions=None):
    """Return every gradient of the step that these micro-batches are this process's part of."""
    step = Step.of(batches, positions)
    losses = {}
    for batch in batches:
        output = model(**batch, within=step)
        output.loss.backward()
        for name, value in (output.losses | {"loss": output.loss.detach()}).items():
            losses[name] = losses.get(name, 0) + value
    gradients = {name: reduce(p.grad) for name, p in model.named_parameters()}
    return gradients, {name: reduce(value) for name, value in losses.items()}


def main(directory):
    """Do every job of ``jobs.pickle``; write the results of all processes to ``rank-N.pickle``."""
    torch.set_num_threads(1)
    distributed.join()
    jobs = pickle.loads((directory / "jobs.pickle").read_bytes())
    results = {}
    for name, (arguments, batches) in jobs["gradients"].items():
        mine = batches[distributed.rank()]
        results[name] = gradients_of(make(**arguments), mine, distributed.sum_over_processes)
    for name, settings, stop_at in jobs["runs"]:
        recipe = build_recipe(settings)
        if stop_at:
            try:
                train(recipe, progress=InterruptAfter(stop_at))
            except TrainingInterrupted as stop:
                results[f"{name} stopped"] = stop.checkpoint.name
        result = train(recipe, resume=bool(stop_at))
        results[name] = (result.history, result.quality, result.tokens)
    (directory / f"rank-{distributed.rank()}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    distributed.end(0)
