"""The column ``accelerate launch`` of the matrix of families.

accelerate launch … family_processes.py DIR NAME=DIRECTORY… writes DIR/rank-N.pickle: of every
family the loss and the gradients of a step on this process's rows, or the error that ended it.
"""

import pickle
import sys
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from prismlm.models.sidecar import load_sidecar
from prismlm.training import LossWeights, PrismForCausalLM

# R1 is over the batch of a process: in one process its minimum is over more rows.
WEIGHTS = LossWeights(
    prototype_pull=0.0, point_pull=0.1, residual=0.1, diversity=0.01, prototype_only_kl=0.5
)


def both(directory):
    """Return model and head as they are trained."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    head = load_sidecar(directory, model).head.requires_grad_(True)
    model.requires_grad_(not getattr(model, "is_quantized", False))
    return PrismForCausalLM(model, head.train(), weights=WEIGHTS, detach=False).train()


def gradients(model):
    """Return every gradient there is."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def step(accelerator, directory, rows):
    """Return the loss and the gradients of a step on this process's rows."""
    made = both(directory)
    spread = accelerator.prepare(made)
    with accelerator.split_between_processes(rows) as mine:
        loss = spread(input_ids=mine, labels=mine).loss
    accelerator.backward(loss)
    return {"loss": accelerator.reduce(loss.detach(), "mean"), "gradients": gradients(made)}


def main(directory, *families):
    """Do every family."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rows = torch.load(directory / "rows.pt")
    results = {}
    for name, path in (family.split("=", 1) for family in families):
        try:
            results[name] = step(accelerator, path, rows)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    number = accelerator.process_index
    (directory / f"rank-{number}.pickle").write_bytes(pickle.dumps(results))
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
