"""The columns DDP and FSDP2 of the matrix of uncertainty feedback: two processes do all families.

python feedback_processes.py DIR writes DIR/rank-N.pickle: of every column and family the loss,
the gradients and the codes of a step, or the error that ended it.
"""

import pickle
import sys
import traceback
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))

from prismlm.models.seam import decoder_and_embeddings
from prismlm.training import parallel
from tests.helpers.feedback_calls import PROMPT, Fed
from tests.helpers.feedback_families import TITLES
from tests.helpers.two_processes import fork

COLUMNS = ("DDP", "FSDP2")
ROWS = 4


def trained(name):
    """Return a family's model as it is trained; towers of images stay as they are."""
    fed = Fed(name, passes=2)
    fed.model.train()
    for key, parameter in fed.model.named_parameters():
        parameter.requires_grad_("vision_tower" not in key)
    return fed


def step_of(fed, rows):
    """Return the loss and the codes of these rows of the batch, with gradients left behind."""
    ids = fed.rows(ROWS, PROMPT + 2)[rows]
    output = fed.call(ids, rows=rows, labels=ids)
    output.loss.backward()
    return output.loss.detach(), output.uncertainty_codes


def spread(name, column):
    """Return what one step gives: the mean loss, whole gradients, own codes and all codes seen."""
    fed = trained(name)
    if column == "DDP":
        fed.run = DistributedDataParallel(fed.model, broadcast_buffers=False)
    else:
        mesh = init_device_mesh("cpu", (parallel.world_size(),))
        for block in parallel.blocks(decoder_and_embeddings(fed.model)[0]):
            fully_shard(block, mesh=mesh)
        fed.run = fully_shard(fed.model, mesh=mesh)
    each = ROWS // parallel.world_size()
    first = each * parallel.rank()
    loss, codes = step_of(fed, list(range(first, first + each)))
    found = {
        name: parallel.full(p.grad).clone()
        for name, p in fed.model.named_parameters()
        if p.grad is not None
    }
    seen = parallel.sum_over_processes(fed.feedback.embedding.seen.int()) > 0
    mean = parallel.sum_over_processes(loss) / parallel.world_size()
    return {"loss": mean, "gradients": found, "codes": codes, "seen": seen}


def main(directory):
    """Do every family in both ways."""
    torch.set_num_threads(1)
    parallel.join()
    results = {}
    for column in COLUMNS:
        for name in TITLES:
            try:
                results[column, name] = spread(name, column)
            except Exception:
                results[column, name] = {"error": traceback.format_exc()}
    (directory / f"rank-{parallel.rank()}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), main))
