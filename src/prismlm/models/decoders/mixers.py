"""Finding the prototype mixers of a model, and half-lives of their channels."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.layers import MixerEvidence, PrototypeMixer
from prismlm.models.seam import run_decoder


def has_mixers(model: nn.Module) -> bool:
    """Say whether a model has a prototype mixer."""
    return any(isinstance(module, PrototypeMixer) for module in model.modules())


def mixers_of(model: nn.Module) -> tuple[PrototypeMixer, ...]:
    """Return the mixer of each layer, first to last; raise InputError if there is none."""
    found = tuple(module for module in model.modules() if isinstance(module, PrototypeMixer))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
        raise InputError(
            f"a model of type {kind!r} has no prototype mixer, so there are no channels to read: "
            "expected a model of type 'prismlm_protot'."
        )
    return found


def chosen_layers(count: int, layers: Iterable[int] | None) -> tuple[int, ...]:
    """Return the layers asked for, or all of ``count``."""
    chosen = tuple(range(count)) if layers is None else tuple(layers)
    for layer in chosen:
        check_layer(count, layer)
    return chosen


def check_layer(count: int, layer: int) -> None:
    """Raise InputError unless 0 ≤ layer < count."""
    if not 0 <= layer < count:
        raise InputError(f"there is no layer {layer}: the model's layers are 0 to {count - 1}.")


def check_channel(channels: int, layer: int, channel: int) -> None:
    """Raise InputError unless 0 ≤ channel < channels."""
    if not 0 <= channel < channels:
        raise InputError(
            f"there is no channel {channel} in layer {layer}: expected 0 to {channels - 1}."
        )


def half_life(decay: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return −ln 2 / ln β: after how many positions half of what was written is left; float64.

    Source: ProtoT, §5.1.
    """
    if not bool(((decay > 0) & (decay < 1)).all()):
        raise InputError("a decay β has a half-life between 0 and 1 only, both excluded.")
    return -math.log(2) / decay.double().log()


def half_lives(model: nn.Module) -> tuple[Float[Tensor, " R"], ...]:
    """Return the half-life of every channel, in positions, layer by layer; float64 on the CPU."""
    mixers = mixers_of(model)
    if any(mixer.decay_map is not None for mixer in mixers):
        raise InputError(
            "decays of this model depend on the token (decay_mode='token'), so its channels have "
            "no half-life of their own: read_channels(model, ids) has those over a text."
        )
    return tuple(half_life(mixer.decay.detach().cpu()) for mixer in mixers)


@torch.no_grad()
def gates_of(
    model: nn.Module, input_ids: Int64[Tensor, "B T"], mask: Tensor | None = None
) -> tuple[MixerEvidence, ...]:
    """Return the gates of each layer from one forward pass, which forms no logits."""
    mixers_of(model)
    return run_decoder(model, input_ids, mask, output_gates=True).gates
