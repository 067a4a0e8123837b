"""Dropout for Hugging Face's decoders whose classes have none where the recipe wants it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.training.parallel import blocks

# What a block adds to the residual stream, and where its feed-forward network ends, by family.
ATTENTION_AND_MLP = (("self_attn.o_proj", "mlp.down_proj"), ("mlp.down_proj",))
MIXER = (("mixer",), ())
PLACES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ATTENTION_AND_MLP),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), MIXER),
}


def add_dropout(decoder: Any, rate: float) -> None:
    """Put dropout into a decoder: nothing of it is saved, and it acts in training mode alone.

        e ← dropout(e),   h ← h + dropout(part(norm(h))),   mlp(x) = W_down dropout(inner(x))

    after the token embeddings, on what every part of a block adds to the residual stream, and on
    what enters the last matrix of a feed-forward network, where there is one. Dropout that the
    class has of its own, such as ``attention_dropout``, is beside it.

    Source: ProtoT, §4 (Dropout), for all of the models that it compares.

    Args:
        decoder: a causal language model.
        rate: the probability that an element is set to 0; 0 changes nothing.

    Raises:
        InputError: a family whose blocks are not known.
    """
    if not rate:
        return
    family = decoder.config.model_type
    if family not in PLACES:
        own = sorted(key for key in decoder.config.to_dict() if "drop" in key)
        hint = f" Its own settings are {', '.join('model.' + key for key in own)}." if own else ""
        raise InputError(
            f"the recipe sets dropout to {rate:g}, and where it goes is known for models of type "
            f"{', '.join(PLACES)}, not {family!r}. Leave it out.{hint}"
        )
    # Not models.watch: these stand as long as the model does, for whoever trains it.
    leaving, entering = partial(_leaving, rate), partial(_entering, rate)
    decoder.get_input_embeddings().register_forward_hook(leaving)
    added, inner = PLACES[family]
    for block in blocks(decoder):
        for name in added:
            block.get_submodule(name).register_forward_hook(leaving)
        for name in inner:
            block.get_submodule(name).register_forward_pre_hook(entering)


def _leaving(rate: float, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return F.dropout(output, rate, module.training)


def _entering(rate: float, module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (F.dropout(inputs[0], rate, module.training),)
