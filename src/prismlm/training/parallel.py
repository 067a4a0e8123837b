"""One process or several that train one model: who they are, and how the model is spread.

DDP, which accelerate puts around the model, keeps a copy of everything in every process. FSDP2
shards the decoder's parameters, gradients and optimizer state, one unit per block; the prototype
head stays whole, since every token needs all of its prototypes.

Functions that exchange something have to be called by every process.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from prismlm.errors import InputError

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
    """End this process now: threads of the process group may abort it while libraries unload."""
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


def over_processes(tensor: Tensor) -> Tensor:
    """Return a tensor summed over all processes."""
    if world_size() == 1:
        return tensor
    reduced = tensor.clone()
    dist.all_reduce(reduced)
    return reduced


def concatenate(rows: Tensor) -> Tensor:
    """Return all processes' rows [n, d], one process after another; n may differ."""
    if world_size() == 1:
        return rows
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, rows.cpu())
    return torch.cat(gathered).to(rows.device)


def any_process(flag: bool) -> bool:
    """Say whether the flag is set in any process."""
    return bool(over_processes(torch.tensor(int(flag))).item())


def on_main(function: Callable[[], T]) -> T:
    """Run a function in the first process; every process returns its value or raises its error."""
    if world_size() == 1:
        return function()
    outcome: list[Any] = [None]
    if is_main():
        try:
            outcome = [function()]
        except Exception as error:  # raised in every process
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@torch.no_grad()
def broadcast_parameters(module: nn.Module) -> None:
    """Give every process the first one's parameters."""
    if world_size() > 1:
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)


def average_gradients(module: nn.Module) -> None:
    """Replace each gradient by its mean over the processes, for what neither DDP nor FSDP holds."""
    if world_size() > 1:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = over_processes(parameter.grad) / world_size()


def blocks(decoder: Any) -> list[nn.Module]:
    """Return a decoder's blocks in order: the modules that its family says are not to be split.

    Of one within another, as Mamba's mixers are within its blocks, the outer alone.
    """
    names = set(getattr(decoder, "_no_split_modules", None) or ())
    outer: list[nn.Module] = []
    within: set[nn.Module] = set()
    for module in decoder.modules():
        if type(module).__name__ in names and module not in within:
            outer.append(module)
            within.update(module.modules())
    if not outer:
        raise InputError(
            f"models of type {decoder.config.model_type!r} do not say what their blocks are, which "
            "compile: true and parallel: fsdp2 need. Use compile: false and parallel: ddp."
        )
    return outer


def compile_blocks(decoder: Any, backend: str = "inductor") -> None:
    """Compile every block of a decoder; hooks and masks, between the blocks, stay eager."""
    for block in blocks(decoder):
        block.compile(backend=backend)


@contextmanager
def uncompiled(decoder: nn.Module) -> Iterator[None]:
    """Run compiled blocks as they were before, since graphs know nothing of hooks put in later."""
    compiled = [(m, m._compiled_call_impl) for m in decoder.modules() if m._compiled_call_impl]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, graph in compiled:
            module._compiled_call_impl = graph


def recompute_activations(decoder: Any) -> None:
    """Make a decoder compute its blocks' activations again in the backward pass."""
    settings = {"use_reentrant": False}
    if hasattr(decoder, "activation_checkpointing_enable"):
        decoder.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        # Its name before transformers 5.20.
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def chosen(parallel: Literal["auto", "ddp", "fsdp2"]) -> Literal["none", "ddp", "fsdp2"]:
    """Return how a model is spread here: not at all in one process."""
    if world_size() == 1:
        return "none"
    return "ddp" if parallel == "auto" else parallel


def shard(decoder: Any, device: torch.device) -> None:
    """Shard a decoder in place with FSDP2: a unit per block, and one of all the rest."""
    if isinstance(decoder, FSDPModule):
        return
    mesh = init_device_mesh(device.type, (world_size(),))
    for block in blocks(decoder):
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)


class Sharded(nn.Module):
    """A model whose decoder is sharded, with the ``no_sync`` that Trainer knows from DDP."""

    def __init__(self, model: nn.Module, decoder: Any) -> None:
        super().__init__()
        self.module = model
        self._decoder = (decoder,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up in each process during the block."""
        (decoder,) = self._decoder
        decoder.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            decoder.set_requires_gradient_sync(True)


@contextmanager
def whole(decoder: nn.Module) -> Iterator[None]:
    """Hold what is outside of a decoder's blocks, W among it, whole in every process."""
    if isinstance(decoder, FSDPModule):
        decoder.unshard()
    try:
        yield
    finally:
        if isinstance(decoder, FSDPModule):
            decoder.reshard()


def full(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, in every process; others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; others are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict without shards; tied weights stay one tensor."""
    if isinstance(module, FSDPModule):
        module.reshard()
    state = module.state_dict(keep_vars=True)
    gathered = {id(value): full(value.detach()) for value in state.values()}
    return {name: gathered[id(value)] for name, value in state.items()}


def gather_shards(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state of a sharded model's optimizer: a ``state_dict`` hook."""
    state = {
        parameter: {name: full(value) for name, value in values.items()}
        for parameter, values in saved["state"].items()
    }
    return saved | {"state": state}


def take_shards(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """Return each process's shards of a whole state: a ``load_state_dict`` hook."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def shard_of(parameter: Tensor, value: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
            return value
        value = value.to(parameter.to_local().device)
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)

    state = {
        index: {name: shard_of(parameters[index], value) for name, value in values.items()}
        for index, values in whole["state"].items()
    }
    return whole | {"state": state}
