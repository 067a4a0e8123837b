"""Several processes that train one model: who they are, and what they agree on.

``torchrun`` starts the processes and says through the environment how many there are. Every
function here is also right, and free, in a single process.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def join() -> None:
    """Join the processes that ``torchrun`` started, if it did and that has not happened yet.

    Tensors on the CPU go through gloo and those on a GPU through NCCL.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")


def end(code: int) -> NoReturn:
    """End this process now, with what was registered for the end done.

    Threads of the process group outlive the interpreter, and with FSDP2 about one process in
    twenty is then aborted while libraries are unloaded, after all its work: torchrun would report
    a failure.
    """
    atexit._run_exitfuncs()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def world_size() -> int:
    """Return how many processes train together, 1 without ``torchrun``."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Say whether this process is the one that writes files and reports."""
    return rank() == 0


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes; the argument is left as it is."""
    if world_size() == 1:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def concatenate(rows: Tensor) -> Tensor:
    """Return all processes' rows [n, d], one process after another; n may differ."""
    if world_size() == 1:
        return rows
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    sizes = [int(count) for count in counts]
    padded = rows.new_zeros(max(sizes), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


def any_process(flag: bool) -> bool:
    """Say whether the flag is set in any process, so that all act on it at the same step."""
    return bool(sum_over_processes(torch.tensor(int(flag))).item())


def on_main(function: Callable[[], T]) -> T:
    """Run a function in the first process; every process returns its value or raises its error."""
    if world_size() == 1:
        return function()
    outcome: list[T | Exception | None] = [None]
    if is_main():
        try:
            outcome = [function()]
        except Exception as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]  # pyright: ignore[reportReturnType]


@torch.no_grad()
def broadcast_parameters(module: nn.Module) -> None:
    """Give every process the first one's parameters."""
    if world_size() > 1:
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)


@torch.no_grad()
def union(mask: Tensor) -> None:
    """Set what any process has set, in every one of them. Every process has to call."""
    if world_size() > 1:
        found = mask.to(torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        mask.copy_(found.bool())


def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over the processes, for what neither DDP nor FSDP holds."""
    if world_size() > 1:
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size()
