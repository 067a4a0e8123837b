"""Spreading a model over processes, and getting the whole of it back.

DDP keeps a copy of everything in every process. FSDP2 shards the decoder's parameters, gradients
and optimizer state, one unit per block; the prototype head stays whole in every process, since
every token needs all of its prototypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from prismlm.errors import InputError
from prismlm.training import distributed

Parallel = Literal["auto", "ddp", "fsdp2"]


def blocks(decoder: Any) -> list[nn.Module]:
    """Return a decoder's blocks in order: the modules that its family says are not to be split.

    Of one within another, as Mamba's mixers are within its blocks, the outer alone.

    Raises:
        InputError: the family does not say.
    """
    names = set(getattr(decoder, "_no_split_modules", None) or ())
    found: list[nn.Module] = []
    within: set[nn.Module] = set()
    for module in decoder.modules():
        if type(module).__name__ in names and module not in within:
            found.append(module)
            within.update(module.modules())
    if not found:
        raise InputError(
            f"models of type {decoder.config.model_type!r} do not say what their blocks are, which "
            "compile: true and parallel: fsdp2 need. Use compile: false and parallel: ddp."
        )
    return found


def compile_blocks(decoder: Any, backend: str = "inductor") -> None:
    """Compile every block of a decoder.

    What is between the blocks stays as it is: the output embedding's hooks, through which the
    states are seen, and the masks, whose form depends on the data.
    """
    for block in blocks(decoder):
        block.compile(backend=backend)


@contextmanager
def uncompiled(decoder: nn.Module) -> Iterator[None]:
    """Run what :func:`compile_blocks` compiled as it was before, so that hooks within it are seen.

    A graph that exists knows nothing of hooks that are put into its block later.
    """
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


def wrap_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Return the model in DDP; every parameter must get a gradient in every step."""
    ids = None if device.type == "cpu" else [device.index]
    return DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


def shard(decoder: Any, device: torch.device) -> None:
    """Shard a decoder in place with FSDP2: a unit per block, and one of all the rest."""
    if isinstance(decoder, FSDPModule):
        return
    mesh = init_device_mesh(device.type, (distributed.world_size(),))
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
    """Hold what is outside of a decoder's blocks, W among it, whole in every process.

    Every process has to enter. Forward passes work within and without.
    """
    if not isinstance(decoder, FSDPModule):
        yield
        return
    decoder.unshard()
    try:
        yield
    finally:
        decoder.reshard()


def full(tensor: Tensor) -> Tensor:
    """Return all of a sharded tensor, in every process; others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor; others are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict without shards; tied weights stay one tensor. Every process has to."""
    if isinstance(module, FSDPModule):
        module.reshard()
    gathered: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            gathered[id(value)] = full(value.detach())
        state[name] = gathered[id(value)]
    return state


def like(parameter: Tensor, value: Any) -> Any:
    """Return this process's shard of what belongs to a sharded parameter; all else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value
    device = parameter.to_local().device
    return distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements)


def chosen(parallel: Parallel) -> Literal["none", "ddp", "fsdp2"]:
    """Return how a model is spread here: not at all in one process."""
    if not dist.is_initialized() or distributed.world_size() == 1:
        return "none"
    return "ddp" if parallel == "auto" else parallel
