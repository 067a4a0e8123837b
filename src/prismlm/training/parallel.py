"""Several processes: what they tell each other, and a model that they share with DDP or FSDP2.

Every process has to call the functions that communicate. With FSDP2 no process holds the model
whole, from its first weights to its last checkpoint: weights and optimizer state are ``DTensor``s.
Checkpoints are those of ``torch.distributed.checkpoint``, which another number of processes can
read.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.files import write_json
from prismlm.models.device import uses_bf16
from prismlm.models.uncertainty_feedback import TABLE, save_uncertainty, uncertainty_of
from prismlm.training.recipe import SHARDED, Recipe

T = TypeVar("T")

# One process may build a corpus or merge a lens for hours while the others wait: the defaults of
# 10 and 30 minutes would abort them. If a process fails, torchrun ends the others. The milliseconds
# fit in 32 bits.
PATIENCE = timedelta(days=20)

# Bytes of a file of weights: what the first process holds at a time, if no weight is larger.
FILE_BYTES = 2 * 10**9
INDEX_FILE = "model.safetensors.index.json"

# One process writes and reads checkpoints too.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def join() -> None:
    """Initialise the process group of ``torchrun``, if there is one: gloo on CPUs, NCCL on GPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)


@cache
def _group_for_thread() -> dist.ProcessGroup | None:
    """Return a group of all processes for a thread of its own; None if there is one process."""
    if world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=PATIENCE)  # pyright: ignore[reportReturnType]


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
    """A model whose decoder, ``model.model``, is sharded, with the ``no_sync`` of Trainer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally during the block."""
        self.module.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.model.set_requires_gradient_sync(True)


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


class _DrawForMeta(TorchDispatchMode):
    """Draws on the CPU what is drawn for a weight on meta, so that the generator advances."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        target: Any = args[0] if args else None
        if torch.Tag.nondeterministic_seeded in func.tags and getattr(target, "is_meta", False):
            func(torch.empty_like(target, device="cpu"), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Sharding:
    """How a decoder is divided among processes, and its initial weights until it is.

    Attributes:
        mesh: of one dimension, or of two where each group of processes shares a copy.
    """

    def __init__(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
        self.mesh, self._policy = mesh, policy or MixedPrecisionPolicy()
        # By the identity of a parameter on meta: that parameter and this process's shard.
        self._initial: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    @classmethod
    def of_recipe(cls, recipe: Recipe, device: str) -> Sharding | None:
        """Return the sharding of a recipe, or None if every process holds the whole model."""
        world = world_size()
        if recipe.parallel not in SHARDED or world == 1:
            return None
        shape: tuple[int, ...] = (world,)
        if recipe.parallel == "hsdp":
            size = recipe.shard_processes or int(os.environ.get("LOCAL_WORLD_SIZE", world))
            if world % size:
                raise InputError(
                    f"shard_processes is {size}, which does not divide the {world} processes. "
                    "Choose a divisor, such as the number of processes of a machine."
                )
            shape = (world // size, size)
        names = ("replicate", "shard")[-len(shape) :]
        policy = None
        if uses_bf16(recipe.precision, device):
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return cls(init_device_mesh(device, shape, mesh_dim_names=names), policy)

    def build(self, build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """Build a model on meta with the weights that ``build()`` would draw, kept as shards.

        Each process draws every number, of one block or embedding at a time, and keeps its own.
        """
        from accelerate import init_empty_weights

        def initialize_weights(model: PreTrainedModel) -> None:
            units = set(model._no_split_modules or ())
            self._initialise(model, model._initialize_weights, units)

        with (
            torch.no_grad(),
            init_empty_weights(include_buffers=False),
            patch.object(PreTrainedModel, "initialize_weights", initialize_weights),
            _DrawForMeta(),
        ):
            model = build()
        model.tie_weights()
        return model

    def _initialise(self, module: nn.Module, initialise: Any, units: set[str]) -> None:
        """Initialise as ``PreTrainedModel.initialize_weights`` does, children first."""
        if getattr(module, "_is_hf_initialized", False):
            return
        if isinstance(module, PreTrainedModel):
            initialise = module._initialize_weights
        # A block may initialise the weights of its parts again.
        whole = type(module).__name__ in units
        owners = list(module.modules()) if whole else [module]
        named = [(o, n, p) for o in owners for n, p in o._parameters.items()]
        weights = [(o, n, p) for o, n, p in named if p is not None and p.is_meta]
        for owner, name, p in weights:
            real = torch.empty_like(p, device="cpu")
            owner._parameters[name] = nn.Parameter(real, p.requires_grad)
        for child in module.children():
            self._initialise(child, initialise, units)
        initialise(module)
        for owner, name, p in weights:
            real = owner._parameters[name]
            assert real is not None
            self._initial[id(p)] = p, nn.Parameter(self._shard_of(real), p.requires_grad)
            owner._parameters[name] = p

    def _shard_of(self, tensor: Tensor) -> Tensor:
        placements = [Replicate()] * (self.mesh.ndim - 1) + [Shard(0)]
        whole = distribute_tensor(tensor.detach(), self.mesh, placements, src_data_rank=None)
        # A copy, since a shard may be a view of the whole.
        return whole.clone()

    def apply(self, decoder: Any) -> None:
        """Shard a decoder in place, by block; weights on meta become those of :meth:`build`."""
        named = decoder.named_parameters(remove_duplicate=False)
        initial = {name: self._initial[id(p)][1] for name, p in named if p.is_meta}
        for module in (*blocks(decoder), decoder):
            fully_shard(module, mesh=self.mesh, mp_policy=self._policy)
        decoder.load_state_dict(initial, strict=False, assign=True)
        self._initial.clear()


def shard_frozen(model: Any, device: str) -> None:
    """Shard the frozen weights of a model by block, in place; the others stay whole."""
    mesh = init_device_mesh(device, (world_size(),))
    learned = {p for p in model.parameters() if p.requires_grad}
    for parameter in learned:
        parameter.data = parameter.data.to(device)
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh, ignored_params=learned)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict in which tied weights have one name."""
    state = module.state_dict(keep_vars=True)
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: state[name].detach() for name in state if first[id(state[name])] == name}


@contextmanager
def cause_raised() -> Iterator[None]:
    """Raise the cause of a CheckpointException, which is a BaseException, in its place."""
    try:
        yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def save_shards(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, background: bool = False
) -> Future[Any] | None:
    """Write the shards of model and optimizer; in the background, a copy of them.

    What is returned then is awaited within :func:`cause_raised`.
    """
    state = {"model": state_of(model), "optimizer": optimizer.state_dict()["state"]}
    if background:
        group: Any = _group_for_thread()
        future: Any = async_save(state, checkpoint_id=directory, process_group=group)
        return future
    with cause_raised():
        save_checkpoint(state, checkpoint_id=directory)
    return None


def load_shards(directory: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint into a model, sharded or not."""
    with cause_raised():
        load_checkpoint({"model": state_of(model)}, checkpoint_id=directory)


def load_optimizer(directory: Path, parameters: Iterable[Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return the optimizer state of a checkpoint, divided as the parameters are."""
    saved = FileSystemReader(directory).read_metadata().state_dict_metadata
    order = list(parameters)
    state: dict[int, dict[str, Tensor]] = {}
    for key, entry in saved.items():
        section, *path = key.split(".")
        if section == "optimizer":
            parameter, size = order[int(path[0])].detach(), getattr(entry, "size", ())
            like = parameter if size == parameter.shape else torch.empty(size)
            state.setdefault(int(path[0]), {})[path[1]] = torch.empty_like(like)
    with cause_raised():
        load_checkpoint({"optimizer": state}, checkpoint_id=directory)
    return state


def save_pretrained(decoder: Any, directory: Path) -> None:
    """Write a sharded decoder as a Hugging Face checkpoint of safetensors.

    Weights are gathered one at a time; the first process holds those of one file.
    """
    state, feedback = state_of(decoder), uncertainty_of(decoder)
    table = {name for name in state if name.startswith(TABLE)}
    ignored = table | {*(decoder._keys_to_ignore_on_save or ())}
    if is_main():
        # The configuration alone.
        decoder.save_pretrained(directory, state_dict={})
    if feedback is not None:
        # A table is saved with the fingerprint of the embeddings.
        inputs = decoder.get_input_embeddings().weight
        names = table | {name for name, p in decoder.named_parameters() if p is inputs}
        whole = {name: full(state[name]).cpu() for name in sorted(names)}
        if is_main():
            save_uncertainty(directory, feedback, whole)
    sizes = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in state.items()
        if name not in ignored
    }
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=FILE_BYTES)
    for file, members in plan.filename_to_tensors.items():
        tensors: dict[str, Tensor] = {}
        for name in members:
            tensor = full(state[name])
            if is_main():
                tensors[name] = tensor.cpu().contiguous()
        if is_main():
            save_file(tensors, str(directory / file), metadata={"format": "pt"})
    if plan.is_sharded and is_main():
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(directory / INDEX_FILE, index)
