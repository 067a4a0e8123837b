"""What single positions write into channels, keep there and read, for one text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.errors import InputError
from prismlm.lens.routing.activations import routing_of
from prismlm.lens.routing.mixers import check_channel, chosen_layers, half_life, mixers_of
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """Gates and memory of one layer over T positions; R channels; on the CPU.

    Attributes:
        layer: from 0.
        write: the write gate, float32.
        read: the read gate, float32.
        mass: M_ik = Σ_{j<i} β_k^(i−j) write_jk, what position i finds in channel k; float64.
        decay: β_k, float32.
    """

    layer: int
    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    mass: Float[Tensor, "T R"]
    decay: Float[Tensor, " R"]

    @property
    def half_life(self) -> Float[Tensor, " R"]:
        """−ln 2 / ln β_k, in positions; float64."""
        return half_life(self.decay)

    def memory(self, channel: int) -> Float[Tensor, "T T"]:
        """Return the weight of position j in what position i finds in a channel, float64.

            weight_ij = β_k^(i−j) write_jk / M_ik  for j < i, else 0

        Rows sum to 1, but for those of an empty channel (M below 1e-30), which are 0. A convolution
        on the values comes before: j's value then holds some of the values before j.

        Raises:
            InputError: there is no such channel.
        """
        check_channel(len(self.decay), self.layer, channel)
        place = torch.arange(len(self.write), dtype=torch.float64)
        distance = place[:, None] - place
        decay, mass = self.decay[channel].double(), self.mass[:, channel, None]
        weight = (distance * decay.log()).exp() * self.write[:, channel].double()
        past = (distance > 0) & (mass >= EMPTY_BELOW)
        return torch.where(past, weight / mass, 0.0)


@dataclass(frozen=True, eq=False)
class TextCurves:
    """Curves of a text.

    Attributes:
        tokens: its tokens, decoded one by one.
        token_ids: int64 [T].
        layers: those asked for.
    """

    tokens: tuple[str, ...]
    token_ids: Int64[Tensor, " T"]
    layers: tuple[LayerCurves, ...]


def discounted_mass(
    write: Float[Tensor, "... T R"], decay: Float[Tensor, " R"]
) -> Float[Tensor, "... T R"]:
    """Return M_i = β ⊙ (M_{i−1} + write_{i−1}), M_0 = 0, in float64."""
    beta = decay.double()
    mass = torch.zeros(write.shape, dtype=torch.float64, device=write.device)
    for i in range(1, write.shape[-2]):
        mass[..., i, :] = beta * (mass[..., i - 1, :] + write[..., i - 1, :])
    return mass


def read_channels(
    model: PreTrainedModel, input_ids: Int64[Tensor, " T"], layers: Iterable[int] | None = None
) -> tuple[LayerCurves, ...]:
    """Return gates and memory of one sequence, in the layers asked for or in all.

    Interventions that hold are seen in the gates.

    Source: ProtoT, §5.1 and Fig. 3.

    Raises:
        InputError: no prototype mixer, an unknown layer, or not one sequence of tokens.
    """
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), layers)
    if input_ids.ndim != 1 or not input_ids.numel():
        raise InputError(
            f"input_ids are {list(input_ids.shape)}: expected [T], one sequence of at least one "
            "token."
        )
    routing = routing_of(model, input_ids[None])
    curves: list[LayerCurves] = []
    for layer in chosen:
        write, read = (gate[0].float().cpu() for gate in routing[layer])
        decay = mixers[layer].decay.detach().cpu()
        curves.append(LayerCurves(layer, write, read, discounted_mass(write, decay), decay))
    return tuple(curves)


def read_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layers: Iterable[int] | None = None,
) -> TextCurves:
    """Return the curves of a text, as :func:`read_channels`, with its tokens.

    Raises:
        InputError: the text is empty, or as :func:`read_channels`.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    if not ids.numel():
        raise InputError("the text is empty: give at least one token to read.")
    curves = read_channels(model, ids.to(model.device), layers)
    return TextCurves(decoded(tokenizer, ids.tolist()), ids, curves)


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> tuple[str, ...]:
    """Return the text of each token by itself."""
    return tuple(
        str(tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in ids
    )
