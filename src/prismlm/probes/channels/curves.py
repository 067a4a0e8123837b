"""What single positions write into channels, keep there and read, along one text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.corpus.words import WordedText, encode, worded
from prismlm.layers import PrototypeMixer
from prismlm.models.decoders.mixers import (
    check_channel,
    chosen_layers,
    gates_of,
    half_life,
    mixers_of,
)
from prismlm.models.positions import check_sequence
from prismlm.models.watch import Hook, watch
from prismlm.ops.prototype_mixer.state import EMPTY_BELOW

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """Gates and memory of one layer over T positions and R channels; on the CPU.

    Attributes:
        layer: from 0.
        write, read: the gates, float32.
        mass: M_ik = Σ_{j<i} β_k^(i−j) write_jk, what position i finds in channel k; float64.
        decay: β_k, or β_jk where decays depend on the token; float32.
    """

    layer: int
    write: Float[Tensor, "T R"]
    read: Float[Tensor, "T R"]
    mass: Float[Tensor, "T R"]
    decay: Float[Tensor, " R"] | Float[Tensor, "T R"]

    @property
    def half_life(self) -> Float[Tensor, " R"]:
        """−ln 2 / ln β_k in positions, float64; with decays by token of the text's mean ln β."""
        if self.decay.ndim == 1:
            return half_life(self.decay)
        return half_life(self.decay.double().log().mean(0).exp())

    def memory(self, channel: int) -> Float[Tensor, "T T"]:
        """Return the weight of position j in what position i finds in a channel, float64.

            weight_ij = β_k^(i−j) write_jk / M_ik  for j < i, else 0

        With decays by token, β_k^(i−j) is β_jk ⋯ β_(i−1)k. Rows sum to 1, but for those of an empty
        channel (M below 1e-30), which are 0. With a convolution on the values, j's value also holds
        some of the values before it.
        """
        check_channel(self.write.shape[1], self.layer, channel)
        mass = self.mass[:, channel, None]
        # Σ ln β before each position: differences are the logarithms of what remains.
        logs = self.decay[..., channel].double().log().expand(len(self.write))
        before = logs.cumsum(0) - logs
        past = torch.ones_like(mass @ mass.T, dtype=torch.bool).tril(-1) & (mass >= EMPTY_BELOW)
        left = (before[:, None] - before).masked_fill(~past, -torch.inf).exp()
        return torch.where(past, left * self.write[:, channel].double() / mass, 0.0)


@dataclass(frozen=True)
class WordedCurves:
    """A text as words and tokens, with the curves of each layer that was asked for."""

    text: WordedText
    token_ids: tuple[int, ...]
    curves: tuple[LayerCurves, ...]


def discounted_mass(
    write: Float[Tensor, "T R"], decay: Float[Tensor, " R"] | Float[Tensor, "T R"]
) -> Float[Tensor, "T R"]:
    """Return M_i = β_(i−1) ⊙ (M_{i−1} + write_{i−1}), M_0 = 0, in float64."""
    beta = decay.double().expand(write.shape)
    mass = torch.zeros(write.shape, dtype=torch.float64)
    for i in range(1, len(write)):
        mass[i] = beta[i - 1] * (mass[i - 1] + write[i - 1])
    return mass


def read_channels(
    model: PreTrainedModel, input_ids: Int64[Tensor, " T"], layers: Iterable[int] | None = None
) -> tuple[LayerCurves, ...]:
    """Return gates and memory of one sequence (ProtoT, §5.1 and Fig. 3), interventions included."""
    mixers = mixers_of(model)
    chosen = chosen_layers(len(mixers), layers)
    check_sequence(input_ids)
    with decays_seen(mixers) as decays:
        by_layer = gates_of(model, input_ids[None])
    curves: list[LayerCurves] = []
    for layer in chosen:
        write, read = (gate[0].float().cpu() for gate in by_layer[layer])
        decay = decays[mixers[layer]].cpu()
        decay = decay if decay.ndim == 1 else decay[0]
        curves.append(LayerCurves(layer, write, read, discounted_mass(write, decay), decay))
    return tuple(curves)


@contextmanager
def decays_seen(mixers: Iterable[PrototypeMixer]) -> Iterator[dict[nn.Module, Tensor]]:
    """Yield a mapping that passes of the block fill: each mixer's decays, [R] or [B, T, R]."""
    decays: dict[nn.Module, Tensor] = {}

    def note(mixer: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        assert isinstance(mixer, PrototypeMixer)
        decays[mixer] = mixer.decay_of(args[0]).detach()

    with watch(Hook(mixer, before=note) for mixer in mixers):
        yield decays


def read_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    layers: Iterable[int] | None = None,
) -> WordedCurves:
    """Return :func:`read_channels` of a text, with its words and tokens."""
    ids, spans = encode(tokenizer, text)
    curves = read_channels(model, torch.tensor(ids, device=model.device), layers)
    return WordedCurves(worded(text, spans), tuple(ids), curves)
