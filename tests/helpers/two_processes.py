"""Two processes of one group, as torchrun starts them, or forked from one that has imported all.

python -m torch.distributed.run --nproc-per-node 2 two_processes.py DIR, which is three starts of
Python with PyTorch, or python two_processes.py DIR, which is one.
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
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from prismlm.corpus.store import Corpus
from prismlm.corpus.windows import pack
from prismlm.errors import Interrupted
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import attach, build_recipe, parallel, train
from prismlm.training.parallel import Sharding, shard_frozen
from prismlm.training.setup import ShuffledSignal
from prismlm.training.trainer import latest_checkpoint
from prismlm.training.tuning import Tuning, with_adapters
from tests.helpers.runs import InterruptAfter
from tests.helpers.tiny_head import make


def gradients_of(model, batches):
    """Return every gradient of the mean loss over some micro-batches, and that loss."""
    total = 0
    for batch in batches:
        loss = model(**batch).loss / len(batches)
        loss.backward()
        total = total + loss.detach()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, total


def spread_gradients_of(arguments, spread, recompute, batches):
    """Return the whole gradients of a step that DDP or FSDP2 takes, as PrismTrainer spreads it."""
    model = make(**arguments).train()
    if recompute:
        parallel.recompute_activations(model.model)
    if spread == "ddp":
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    else:
        mesh = init_device_mesh("cpu", (parallel.world_size(),))
        Sharding(mesh).apply(model.model)
        wrapped = parallel.Sharded(model, model.model)
    total = 0
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
    rows = pack(Corpus.open(corpus), np.arange(20), 64, seed=0, share_rows=True)
    adapted = with_adapters(model, options)
    if shards is not None:
        shard_frozen(model, shards)
    tuning = Tuning(adapted, rows, options, bf16=False)
    losses = [tuning.take(np.arange(first, first + batch))["loss"] for first in range(4)]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    held = sum(getattr(p, "to_local", p.detach)().numel() for p in frozen)
    learned = [p.detach() for p in tuning.learned]
    return losses, learned, held / sum(p.numel() for p in frozen)


def main(directory):
    """Do every job of ``jobs.pickle``; write the results of all processes to ``rank-N.pickle``."""
    torch.set_num_threads(1)
    parallel.join()
    jobs = pickle.loads((directory / "jobs.pickle").read_bytes())
    results = {}
    for name, (*how, batches) in jobs.get("spread", {}).items():
        results[name] = spread_gradients_of(*how, batches[parallel.rank()])
    for name, parts in jobs.get("shuffled", {}).items():
        results[name] = ShuffledSignal(5)(parts[parallel.rank()])
    for arguments in jobs.get("tuning", ()):
        results["tuning"] = losses_of_tuning(*arguments)
    for arguments in jobs.get("attach", ()):
        attach(*arguments)
    for name, settings, stop_at in jobs.get("runs", ()):
        recipe = build_recipe(settings)
        if stop_at:
            try:
                train(recipe, progress=InterruptAfter(stop_at))
            except Interrupted:
                newest = latest_checkpoint(recipe.out / "checkpoints")
                results[f"{name} stopped"] = newest.name
        result = train(recipe, resume=bool(stop_at))
        results[name] = (result.history, result.quality, result.tokens)
    (directory / f"rank-{parallel.rank()}.pickle").write_bytes(pickle.dumps(results))


def fork(directory, main=main, processes=2):
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
    if "RANK" in os.environ:
        main(Path(sys.argv[1]))
        parallel.end(0)
    sys.exit(fork(Path(sys.argv[1])))
