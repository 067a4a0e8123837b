"""FSDP2: a model that no process holds whole, from its first weights to its last checkpoint.

Weights and optimizer state are ``DTensor``s. Checkpoints are those of
``torch.distributed.checkpoint``, which another number of processes can read. Every process has to
call these functions.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
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
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from prismlm.errors import InputError
from prismlm.files import write_json
from prismlm.models.device import uses_bf16
from prismlm.models.uncertainty_feedback import TABLE, save_uncertainty, uncertainty_of
from prismlm.training import parallel
from prismlm.training.recipe import SHARDED, Recipe

# Bytes of a file of weights: what the first process holds at a time, if no weight is larger.
FILE_BYTES = 2 * 10**9
INDEX_FILE = "model.safetensors.index.json"

# One process writes and reads checkpoints too.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


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
        world = parallel.world_size()
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
        weights = [(o, n, p) for o in owners for n, p in o._parameters.items() if p is not None]
        weights = [(owner, name, p) for owner, name, p in weights if p.is_meta]
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
        for module in (*parallel.blocks(decoder), decoder):
            fully_shard(module, mesh=self.mesh, mp_policy=self._policy)
        decoder.load_state_dict(initial, strict=False, assign=True)
        self._initial.clear()


def shard_frozen(model: Any, device: str) -> None:
    """Shard the frozen weights of a model by block, in place; the others stay whole."""
    mesh = init_device_mesh(device, (parallel.world_size(),))
    learned = {p for p in model.parameters() if p.requires_grad}
    for parameter in learned:
        parameter.data = parameter.data.to(device)
    for module in (*parallel.blocks(model), model):
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


def save(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    background: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Future[Any] | None:
    """Write the shards of model and optimizer; in the background, a copy of them.

    That needs a group of its own, unless there is one process, and is awaited within
    :func:`cause_raised`.
    """
    state = {"model": state_of(model), "optimizer": optimizer.state_dict()["state"]}
    if background:
        future: Any = async_save(state, checkpoint_id=directory, process_group=group)
        return future
    with cause_raised():
        save_checkpoint(state, checkpoint_id=directory)
    return None


def load_model(directory: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint into a model, sharded or not."""
    _load(directory, {"model": state_of(model)})


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
    _load(directory, {"optimizer": state})
    return state


def _load(directory: Path, state: dict[str, Any]) -> None:
    with cause_raised():
        load_checkpoint(state, checkpoint_id=directory)


def save_pretrained(decoder: Any, directory: Path) -> None:
    """Write a sharded decoder as a Hugging Face checkpoint of safetensors.

    Weights are gathered one at a time; the first process holds those of one file.
    """
    state, feedback = state_of(decoder), uncertainty_of(decoder)
    table = {name for name in state if name.startswith(TABLE)}
    ignored = table | {*(decoder._keys_to_ignore_on_save or ())}
    if parallel.is_main():
        # The configuration alone.
        decoder.save_pretrained(directory, state_dict={})
    if feedback is not None:
        # A table is saved with the fingerprint of the embeddings.
        inputs = decoder.get_input_embeddings().weight
        names = table | {name for name, p in decoder.named_parameters() if p is inputs}
        whole = {name: parallel.full(state[name]).cpu() for name in sorted(names)}
        if parallel.is_main():
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
            tensor = parallel.full(state[name])
            if parallel.is_main():
                tensors[name] = tensor.cpu().contiguous()
        if parallel.is_main():
            save_file(tensors, str(directory / file), metadata={"format": "pt"})
    if plan.is_sharded and parallel.is_main():
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(directory / INDEX_FILE, index)


def is_sharded(decoder: nn.Module) -> bool:
    """Return whether a decoder is sharded."""
    return isinstance(decoder, FSDPModule)
