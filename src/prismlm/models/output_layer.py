"""The end of a checkpoint alone: final norm and W, read into a model without its other weights."""

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
from prismlm.models.uncertainty_table import has_uncertainty


def read_output_layer(directory: Path) -> Checkpoint:
    """Open a model directory whose model has its final norm and output embedding, and no more.

    With an adapter or uncertainty feedback in it, what is read here is not what is used: refused.
    """
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory. Expected a model directory.")
    load_sidecar(directory)
    if (directory / ADAPTER_CONFIG).is_file() or has_uncertainty(directory):
        raise InputError(
            f"{directory} holds an adapter or uncertainty feedback, which change what the model "
            "computes: merge the adapter, or open the whole model with prismlm.load()."
        )
    refuse_pickles(directory)
    with wrap_read_errors(directory):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        refuse_encoders(config, directory)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    for module in (output_embedding(model), _found_norm(model)):
        if module is not None:
            _fill(model, module, directory)
    sidecar = load_sidecar(directory, model)
    return Checkpoint(model.requires_grad_(False), tokenizer, sidecar)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm between the last layer and the output embedding."""
    found = _found_norm(model)
    if found is None:
        raise InputError(
            f"no final norm is found in {type(model).__name__}: apply it yourself, and give the "
            "states with normalised=True."
        )
    return found


def _found_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the last norm that is no part of a layer."""
    inside: nn.Module = model.base_model
    while True:
        children = list(inside.children())
        norms = [one for one in children if "norm" in type(one).__name__.lower()]
        if norms or len(children) != 1:
            return norms[-1] if norms else None
        inside = children[0]


def _fill(model: PreTrainedModel, module: nn.Module, directory: Path) -> None:
    """Read the weights of one module from the checkpoint's files."""
    paths = [path for path, one in model.named_modules() if one is module]
    if module is output_embedding(model):
        # Where W is the input embedding, files hold it once.
        inputs = model.get_input_embeddings()
        paths += [path for path, one in model.named_modules() if one is inputs]
    # Some checkpoints leave out the prefix of the decoder.
    paths += [path.removeprefix(f"{model.base_model_prefix}.") for path in paths]
    state = {
        key: _tensor(directory, [f"{path}.{key}" for path in paths]) for key in module.state_dict()
    }
    module.load_state_dict(state, assign=True)


def _tensor(directory: Path, names: list[str]) -> Tensor:
    files = [path for path in sorted(directory.glob("*.safetensors")) if path.name != HEAD_FILE]
    try:
        for wanted in names:
            for path in files:
                with safe_open(str(path), framework="pt") as file:
                    if wanted in file.keys():  # noqa: SIM118
                        return file.get_tensor(wanted)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"a weight in {directory} cannot be read: {error}.") from error
    raise FormatError(f"the checkpoint in {directory} has no {names[0]}.")
