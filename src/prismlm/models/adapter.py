"""A low-rank adapter put into a model's weights, to the same bits on every machine."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from prismlm.errors import FormatError
from prismlm.files import read_json

# As PEFT names them.
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX, DOWN, UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@torch.no_grad()
def merge_adapter(model: nn.Module, directory: Path) -> None:
    """Add an adapter that PEFT saved to the weights of the model it was trained on.

        W ← W + (α / r) · B A

    in float64, rounded once. A and B are kept in bfloat16: their products are exact then, and
    their sums as good as exact, so that weights are the same bits whoever merges them.

    Args:
        model: with float weights; changed in place.
        directory: of ``adapter_config.json`` and ``adapter_model.safetensors``.

    Raises:
        FormatError: the adapter is damaged, or of another model.
    """
    config = read_json(directory / CONFIG_FILE)
    path = directory / WEIGHTS_FILE
    try:
        tensors = load_file(path)
        scale = config["lora_alpha"] / config["r"]
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise FormatError(f"the adapter {path} is damaged or no adapter ({error!r}).") from error
    named = dict(model.named_modules())
    for name, down in tensors.items():
        if not name.endswith(DOWN):
            continue
        module = named.get(name.removeprefix(PREFIX).removesuffix(DOWN))
        weight = getattr(module, "weight", None)
        up = tensors[name.removesuffix(DOWN) + UP]
        added = scale * (up.double() @ down.double())
        # GPT-2's layers keep their weight the other way round.
        added = added.T if type(module).__name__ == "Conv1D" else added
        if not isinstance(weight, Tensor) or weight.shape != added.shape:
            raise FormatError(f"the adapter {path} is of another model: {name} fits no weight.")
        weight.copy_(weight.double() + added)
