"""Training one model in several processes, with DDP or FSDP2.

Every process has to call the functions that communicate.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from prismlm.errors import InputError

T = TypeVar("T")

# One process may build a corpus or merge a lens for hours while the others wait: the defaults of
# 10 and 30 minutes would abort them. If a process fails, torchrun ends the others. The milliseconds
# fit in 32 bits.
PATIENCE = timedelta(days=20)


def join() -> None:
    """Initialise the process group of ``torchrun``, if there is one: gloo on CPUs, NCCL on GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)


def end(code: int) -> NoReturn:
    """Exit at once: threads of the process group may crash while libraries are unloaded."""
    atexit._run_exitfuncs()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Whether the first process works within alone().
_alone = False


def world_size() -> int:
    """Return the number of processes, 1 without ``torchrun`` or within :func:`alone`."""
    return dist.get_world_size() if dist.is_initialized() and not _alone else 1


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Return whether this process writes files and shows progress."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if world_size() > 1:
        dist.barrier()


def sum_over_processes(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes."""
    if world_size() == 1:
        return tensor
    reduced = tensor.clone()
    dist.all_reduce(reduced)
    return reduced


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Sum gradients over the processes, each of which has those of its rows, if it has any."""
    if world_size() > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def largest(tensor: Tensor) -> Tensor:
    """Return the elementwise maximum of a tensor over all processes, without gradient."""
    reduced = tensor.detach().clone()
    if world_size() > 1:
        dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return reduced


def concatenate(rows: Tensor) -> Tensor:
    """Return the rows [n, d] of all processes, in order of rank."""
    if world_size() == 1:
        return rows
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, rows.cpu())
    return torch.cat(gathered).to(rows.device)


def on_main(function: Callable[[], T]) -> T:
    """Run a function in the first process; all return its value or raise its exception."""
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None]
    if is_main():
        try:
            outcome = [function()]
        except Exception as error:  # raised in every process below
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def alone(function: Callable[[], object]) -> None:
    """Run a function in the first process, as if it were the only one; the others wait for it."""

    def run() -> None:
        global _alone
        _alone = True
        try:
            function()
        finally:
            _alone = False

    on_main(run)


@torch.no_grad()
def broadcast(parameter: Tensor) -> None:
    """Copy the first process's value of a parameter to all processes."""
    if world_size() > 1:
        dist.broadcast(parameter.data, src=0)


def average_gradients(module: nn.Module) -> None:
    """Average gradients over the processes, for a module that neither DDP nor FSDP2 wraps."""
    if world_size() > 1:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = sum_over_processes(parameter.grad) / world_size()


def blocks(decoder: Any) -> list[nn.Module]:
    """Return a decoder's blocks in order: the outermost modules in ``_no_split_modules``."""
    names = set(getattr(decoder, "_no_split_modules", None) or ())
    outermost: list[nn.Module] = []
    nested: set[nn.Module] = set()
    for module in decoder.modules():
        # FSDP2 makes a LlamaDecoderLayer an FSDPLlamaDecoderLayer.
        if type(module).__name__.removeprefix("FSDP") in names and module not in nested:
            outermost.append(module)
            nested.update(module.modules())
    if not outermost:
        raise InputError(
            f"models of type {decoder.config.model_type!r} do not declare their blocks "
            "(_no_split_modules), which --lora of prismlm attach, and dropout, compile: true and "
            "parallel: fsdp2 or hsdp of a recipe, need: do without them."
        )
    return outermost


def compile_blocks(decoder: Any, backend: str = "inductor") -> None:
    """Compile every block of a decoder; what runs between the blocks stays eager."""
    for block in blocks(decoder):
        block.compile(backend=backend)


def recompute_activations(decoder: Any) -> None:
    """Make a decoder recompute the activations of its blocks in the backward pass."""
    settings = {"use_reentrant": False}
    if hasattr(decoder, "activation_checkpointing_enable"):
        decoder.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        # The name before transformers 5.20.
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


class Sharded(nn.Module):
    """A model with a sharded decoder and the ``no_sync`` that Trainer expects."""

    def __init__(self, model: nn.Module, decoder: Any) -> None:
        super().__init__()
        self.module = model
        # In a tuple, so that it is not registered as a second submodule.
        self._decoder = (decoder,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally during the block."""
        (decoder,) = self._decoder
        decoder.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            decoder.set_requires_gradient_sync(True)


@contextmanager
def unsharded(decoder: nn.Module) -> Iterator[None]:
    """Gather a decoder's parameters outside its blocks, such as W, in every process."""
    if isinstance(decoder, FSDPModule):
        decoder.unshard()
    try:
        yield
    finally:
        if isinstance(decoder, FSDPModule):
            decoder.reshard()


def full(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor in every process; return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
