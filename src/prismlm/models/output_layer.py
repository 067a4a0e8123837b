"""Load only the final norm and output embedding W of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from prismlm.errors import FormatError, InputError
from prismlm.models.checkpoint import (
    ADAPTER_CONFIG,
    Checkpoint,
    refuse_encoders,
    refuse_pickles,
    wrap_read_errors,
)
from prismlm.models.seam import output_embedding
from prismlm.models.sidecar import HEAD_FILE, load_sidecar
from prismlm.models.uncertainty_feedback import has_uncertainty


def read_output_layer(directory: Path) -> Checkpoint:
    """Open a model directory with only the weights of final norm and output embedding.

    Directories with an adapter or uncertainty feedback are refused.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory. Expected a model directory.")
    load_sidecar(directory)
    if (directory / ADAPTER_CONFIG).is_file() or has_uncertainty(directory):
        raise InputError(
            f"{directory} has an adapter or uncertainty feedback, which change what the model "
            "computes: merge the adapter, or open the whole model with prismlm.load()."
        )
    refuse_pickles(directory)
    with wrap_read_errors(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        refuse_encoders(config, directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    for module in (output_embedding(model), _last_norm(model)):
        if module is not None:
            _fill(model, module, directory)
    sidecar = load_sidecar(directory, model)
    return Checkpoint(model.requires_grad_(False), tokenizer, sidecar)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm between the last layer and the output embedding."""
    norm = _last_norm(model)
    if norm is None:
        raise InputError(
            f"{type(model).__name__} has no recognisable final norm: apply it yourself, and pass "
            "the states with normalised=True."
        )
    return norm


def _last_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the last norm outside of the layers."""
    decoder: nn.Module = model.base_model
    while True:
        children = list(decoder.children())
        norms = [child for child in children if "norm" in type(child).__name__.lower()]
        if norms or len(children) != 1:
            return norms[-1] if norms else None
        decoder = children[0]


def _fill(model: PreTrainedModel, module: nn.Module, directory: Path) -> None:
    """Read the weights of one module from the checkpoint's files."""
    modules = [module]
    if module is output_embedding(model):
        # A tied W is stored as the input embedding.
        modules.append(model.get_input_embeddings())
    paths = [path for own in modules for path, m in model.named_modules() if m is own]
    # Some checkpoints omit the prefix of the decoder.
    paths += [path.removeprefix(f"{model.base_model_prefix}.") for path in paths]
    state = {
        key: _tensor(directory, [f"{path}.{key}" for path in paths]) for key in module.state_dict()
    }
    module.load_state_dict(state, assign=True)


def _tensor(directory: Path, names: list[str]) -> Tensor:
    files = [path for path in sorted(directory.glob("*.safetensors")) if path.name != HEAD_FILE]
    try:
        for name in names:
            for path in files:
                with safe_open(str(path), framework="pt") as file:
                    if name in file.keys():  # noqa: SIM118
                        return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"a weight in {directory} cannot be read: {error}.") from error
    raise FormatError(f"the checkpoint in {directory} has no {names[0]}.")
