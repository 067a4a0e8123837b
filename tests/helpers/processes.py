"""Processes of one group, forked from one that has imported all: python processes.py DIR COUNT.

They do the jobs of DIR/jobs.pickle, and write what they found to DIR/rank-N.pickle.
"""

import os
import pickle
import socket
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import pack
from prismlm.errors import InputError, Interrupted
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.presets import build_config, build_model
from prismlm.training import attach, build_recipe, parallel, train
from prismlm.training.parallel import Sharding, shard_frozen
from prismlm.training.setup import ShuffledSignal, prepare
from prismlm.training.trainer import latest_checkpoint
from prismlm.training.tuning import Tuning, with_adapters
from tests.helpers.interrupted import InterruptAfter
from tests.helpers.tiny_head import make


def gradients_of(model, batches):
    """Return every gradient of the mean loss over some micro-batches, and that loss."""
    total = 0
    for batch in batches:
        loss = model(**batch).loss / len(batches)
        loss.backward()
        total = total + loss.detach()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, total


def spread_gradients_of(arguments, spread, recompute, by_rank):
    """Return the whole gradients of a step that DDP or FSDP2 takes, as PrismTrainer spreads it."""
    model = make(**arguments).train()
    if recompute:
        parallel.recompute_activations(model.model)
    if spread == "ddp":
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    else:
        mesh = init_device_mesh("cpu", (parallel.world_size(),))
        Sharding(mesh).apply(model.model)
        wrapped = parallel.Sharded(model)
    batches, total = by_rank[parallel.rank()], 0
    for number, batch in enumerate(batches, 1):
        with nullcontext() if number == len(batches) else wrapped.no_sync():
            loss = wrapped(**batch).loss / len(batches)
            total = total + loss.detach()
            rest = sum(p.sum() for p in model.prototype_head.parameters())
            (loss + 0 * rest).backward()
    if spread == "fsdp2":
        parallel.average_gradients(model.prototype_head)
    gradients = {
        name: parallel.full(p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return gradients, parallel.sum_over_processes(total) / parallel.world_size()


def losses_of_tuning(base, corpus, options, batch, shards=None):
    """Return the losses of some steps of fine-tuning, the adapters, and the share of the base."""
    model, _ = read_checkpoint(base)
    opened = Corpus.open(corpus)
    rows = pack(opened, opened.split("train"), 64, seed=0, share_rows=True)
    adapted = with_adapters(model, options)
    if shards is not None:
        shard_frozen(model, shards)
    tuning = Tuning(adapted, rows, options, bf16=False)
    losses = [tuning.take(np.arange(first, first + batch))["loss"] for first in range(4)]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    held = sum(getattr(p, "to_local", p.detach)().numel() for p in frozen)
    learned = [p.detach() for p in tuning.learned]
    return losses, learned, held / sum(p.numel() for p in frozen)


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


def run(settings, stop_at, resume):
    """Return the figures of a run, or its checkpoint if it is stopped, or why it is refused."""
    recipe = build_recipe(settings)
    try:
        result = train(recipe, resume=resume, progress=InterruptAfter(stop_at))
    except Interrupted:
        return latest_checkpoint(recipe.out / "checkpoints").name
    except InputError as error:
        return str(error)
    return result.history, result.quality, result.tokens


def prepared(settings):
    """Return whether every weight of a decoder is sharded once its rows are packed."""
    decoder = prepare(build_recipe(settings)).model.model
    return all(isinstance(p, DTensor) for p in decoder.parameters())


# By kind of job, what does it; each job has a name.
KINDS = {
    "initial": initial_of,
    "prepared": prepared,
    "spread": spread_gradients_of,
    "shuffled": lambda *parts: ShuffledSignal(5)(parts[parallel.rank()]),
    "tuning": losses_of_tuning,
    "attach": attach,
    "runs": run,
}


def main(directory):
    """Do every job of ``jobs.pickle``: by kind and name, the arguments."""
    torch.set_num_threads(1)
    parallel.join()
    jobs, results = pickle.loads((directory / "jobs.pickle").read_bytes()), {}
    for kind, named in jobs.items():
        for name, arguments in named.items():
            results[name] = KINDS[kind](*arguments)
    (directory / f"rank-{parallel.rank()}.pickle").write_bytes(pickle.dumps(results))


def fork(directory, processes):
    """Run ``main`` in processes that the environment tells what torchrun would tell them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    children = []
    for rank in map(str, range(processes)):
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        if not (child := os.fork()):
            try:
                main(directory)
                parallel.end(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), int(sys.argv[2])))
