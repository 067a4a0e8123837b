"""The columns DDP and FSDP2 of the matrix of uncertainty feedback: two processes do all families.

python feedback_processes.py DIR writes DIR/rank-N.pickle: of every column and family the loss,
the gradients and the codes of a step, or the error that ended it.
"""

import pickle
import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from prismlm.models.uncertainty_feedback.place import decoder_and_embeddings
from prismlm.training import distributed, parallel
from tests.helpers.feedback_calls import PROMPT, Fed
from tests.helpers.feedback_families import TITLES
from tests.helpers.two_processes import fork

COLUMNS = ("DDP", "FSDP2")
ROWS = 4


class ModelAndTable(nn.Module):
    """A model and the table beside it as one module, whose parameters DDP and FSDP2 see."""

    def __init__(self, fed):
        super().__init__()
        self.model, self.feedback = fed.model, fed.feedback

    def forward(self, **given):
        return self.model(**given)


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
    both, device = ModelAndTable(fed), torch.device("cpu")
    if column == "DDP":
        fed.run = parallel.wrap_ddp(both, device)
    else:
        mesh = init_device_mesh("cpu", (distributed.world_size(),))
        for block in parallel.blocks(decoder_and_embeddings(fed.model)[0]):
            fully_shard(block, mesh=mesh)
        fed.run = fully_shard(both, mesh=mesh)
    each = ROWS // distributed.world_size()
    first = each * distributed.rank()
    loss, codes = step_of(fed, list(range(first, first + each)))
    found = {
        name: parallel.full(p.grad).clone()
        for name, p in both.named_parameters()
        if p.grad is not None
    }
    distributed.union(fed.feedback.seen)
    mean = distributed.sum_over_processes(loss) / distributed.world_size()
    return {"loss": mean, "gradients": found, "codes": codes, "seen": fed.feedback.seen}


def main(directory):
    """Do every family in both ways."""
    torch.set_num_threads(1)
    distributed.join()
    results = {}
    for column in COLUMNS:
        for name in TITLES:
            try:
                results[column, name] = spread(name, column)
            except Exception:
                results[column, name] = {"error": traceback.format_exc()}
    (directory / f"rank-{distributed.rank()}.pickle").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    sys.exit(fork(Path(sys.argv[1]), main))
