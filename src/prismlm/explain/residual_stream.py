"""The exact split of the last hidden state into what embedding, channels and SwiGLUs added.

One forward pass, watched, says what each of them adds to the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import InputError
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.decoders.mixers import half_life
from prismlm.models.decoders.recurrent_decoder import RecurrentBlock, RecurrentModel
from prismlm.models.positions import check_sequence
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import replay
from prismlm.models.watch import Hook, watch
from prismlm.ops.channel_parts import ChannelFlow, channel_parts, token_parts
from prismlm.ops.prototype_head.routing import inverse_norms


class ActivationParts(NamedTuple):
    """The activations of C prototypes at one position, split; float64. L layers, R channels.

    Attributes:
        embedding: the token's own embedding.
        mlps: each layer's SwiGLU.
        channels: each channel of each layer.
        edit: what an edit of the hidden state added; 0 without one.
    """

    embedding: Float[Tensor, " C"]
    mlps: Float[Tensor, "C L"]
    channels: Float[Tensor, "C L R"]
    edit: Float[Tensor, " C"]

    @property
    def total(self) -> Float[Tensor, " C"]:
        """The sum of all parts: τ cos(z, p)."""
        return self.embedding + self.mlps.sum(1) + self.channels.sum((1, 2)) + self.edit


@dataclass(frozen=True, eq=False)
class DirectPath:
    """What one sequence added to its residual stream, on the CPU; T positions.

    The last hidden state before the last norm is the sum h = embedding + Σ_l (mixer_l + SwiGLU_l),
    and z = g ⊙ h / rms(h). With rms(h) and ‖z‖ as they are at the position, the activation of a
    prototype is linear in h, and so the sum of

        part = τ (g ⊙ v / rms(h))·p_i / (‖z‖ ‖p_i‖)

    over everything v that was added to h. A mixer's output is itself the sum of what its channels
    read, and a channel's of what earlier tokens wrote into it.

    These are direct parts. What a channel gave to later layers and SwiGLUs, and came to z through
    them, counts as theirs.

    Attributes:
        head: whose prototypes.
        embedding: what entered the first layer.
        mlps: what each layer's SwiGLU added.
        flows: what went through each layer's channels.
        first_decays: each layer's decays at the first position, which the flow of one token lacks.
        outputs: each layer's map from what is read to the residual stream.
        hidden: h.
        normed: z as the last norm gives it.
        states: z as the output embedding gets it, edited or not.
        gain: g.
        epsilon: added to the mean square of h under the root.
    """

    head: PrototypeHead
    embedding: Float[Tensor, "T d"]
    mlps: tuple[Float[Tensor, "T d"], ...]
    flows: tuple[ChannelFlow, ...]
    first_decays: tuple[Float[Tensor, " R"], ...]
    outputs: tuple[Float[Tensor, "d D"], ...]
    hidden: Float[Tensor, "T d"]
    normed: Float[Tensor, "T d"]
    states: Float[Tensor, "T d"]
    gain: Float[Tensor, " d"]
    epsilon: float

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def scale(self) -> float:
        """τ, the largest activation there can be."""
        return float(self.head.scale.detach())

    def parts(self, position: int, prototypes: Int64[Tensor, " C"]) -> ActivationParts:
        """Split the activations τ cos(z, p_i) of some prototypes at one position."""
        unit = self._unit(position, prototypes)
        direction = self._directions(position, unit)
        edited = self.states[position].double() - self.normed[position].double()
        channels = [
            channel_parts(flow, position, self.along(position, prototypes, layer))
            for layer, flow in enumerate(self.flows)
        ]
        return ActivationParts(
            direction @ self.embedding[position].double(),
            direction @ torch.stack([mlp[position] for mlp in self.mlps]).double().T,
            torch.stack(channels, 1),
            unit @ edited,
        )

    def token_parts(
        self,
        position: int,
        prototypes: Int64[Tensor, " C"],
        layer: int,
        channels: Int64[Tensor, " C"],
    ) -> Float[Tensor, "C t"]:
        """Split the parts of one channel of a layer for each prototype over the earlier tokens.

        Where a convolution lies on the values, the token credited is the one that gave the value.
        """
        along = self.along(position, prototypes, layer)
        return token_parts(self.flows[layer], position, along, channels)

    def along(
        self, position: int, prototypes: Int64[Tensor, " C"], layer: int
    ) -> Float[Tensor, "C D"]:
        """Return what a reading of a layer's channels is multiplied by to give its direct part."""
        direction = self._directions(position, self._unit(position, prototypes))
        return direction @ self.outputs[layer].double()

    def half_lives(self, position: int, layer: int) -> Float[Tensor, " R"]:
        """Return −ln 2 / ln β, in positions, of the decay that a position saw; float64.

        The first position saw none, and has that of its own.
        """
        self._check_position(position)
        if position == 0:
            return half_life(self.first_decays[layer])
        sums = self.flows[layer].log_decay
        return half_life((sums[position] - sums[position - 1]).exp())

    def _check_position(self, position: int) -> None:
        if not 0 <= position < len(self):
            raise InputError(f"there is no position {position}: the text has {len(self)} tokens.")

    def _unit(self, position: int, prototypes: Tensor) -> Tensor:
        """Return τ p_i / (‖p_i‖ ‖z‖), whose product with z is the activation."""
        self._check_position(position)
        bank = self.head.prototypes.detach()
        chosen = bank[prototypes.to(bank.device)].double().cpu()
        state = self.states[position].double()
        return self.scale * chosen * inverse_norms(chosen) * inverse_norms(state)

    def _directions(self, position: int, unit: Tensor) -> Tensor:
        """Return what h is multiplied by in place of z."""
        mean_square = self.hidden[position].double().square().mean()
        return unit * self.gain.double() * (mean_square + self.epsilon).rsqrt()


class MixerDecoder(NamedTuple):
    """The modules of a decoder of prototype mixers that the residual stream is read from."""

    blocks: tuple[RecurrentBlock, ...]
    mixers: tuple[PrototypeMixer, ...]
    norm: nn.RMSNorm


def mixer_decoder_of(model: nn.Module) -> MixerDecoder | None:
    """Return the decoder in a model, or None unless all of its layers have prototype mixers."""
    decoder = next((part for part in model.modules() if isinstance(part, RecurrentModel)), None)
    if decoder is None:
        return None
    blocks = tuple(block for block in decoder.layers if isinstance(block, RecurrentBlock))
    mixers = tuple(block.mixer for block in blocks if isinstance(block.mixer, PrototypeMixer))
    whole = mixers and len(mixers) == len(decoder.layers)
    norm = decoder.norm
    return MixerDecoder(blocks, mixers, norm) if whole and isinstance(norm, nn.RMSNorm) else None


@torch.no_grad()
def read_direct_path(
    model: nn.Module,
    head: PrototypeHead,
    input_ids: Int64[Tensor, " T"],
    codes: Int64[Tensor, "1 T"] | None = None,
) -> DirectPath:
    """Run a model once over one sequence, and keep what its last hidden states are the sum of.

    Edits and interventions that hold are seen. What is kept grows with T, and not with T². With
    ``codes`` of uncertainty, those that the sequence was read with before are fed.

    Raises:
        InputError: the model has no prototype mixers, or not one sequence of tokens.
    """
    decoder = mixer_decoder_of(model)
    if decoder is None:
        raise InputError(
            f"{type(model).__name__} is no decoder of prototype mixers, so there are no channels "
            "to split its states over."
        )
    check_sequence(input_ids)
    with _watching(decoder) as seen, capture(model, logits=False) as captured:
        model(**replay(input_ids[None], codes), use_cache=False)
    return DirectPath(
        head=head,
        embedding=_kept(seen["embedding", 0]),
        mlps=tuple(_kept(seen["mlp", layer]) for layer in range(len(decoder.blocks))),
        flows=tuple(
            _on_cpu(mixer.flow(seen["inputs", layer], seen["gates", layer]))
            for layer, mixer in enumerate(decoder.mixers)
        ),
        first_decays=tuple(
            mixer.decay_of(seen["inputs", layer][:, :1]).expand(1, 1, -1)[0, 0].cpu()
            for layer, mixer in enumerate(decoder.mixers)
        ),
        outputs=tuple(mixer.output_map.detach().cpu() for mixer in decoder.mixers),
        hidden=_kept(seen["hidden", 0]),
        normed=_kept(seen["normed", 0]),
        states=_kept(captured.z),
        gain=decoder.norm.weight.detach().cpu(),
        epsilon=decoder.norm.eps or 0.0,
    )


@contextmanager
def _watching(decoder: MixerDecoder) -> Iterator[dict[tuple[str, int], Any]]:
    """Note what this thread's passes through a decoder add to the residual stream, by layer."""
    seen: dict[tuple[str, int], Any] = {}

    def note(name: str, layer: int = 0) -> Callable[..., None]:
        """Note the first input of a module, or its output where it has one by now."""

        def hook(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            seen[name, layer] = (*output, args[0])[0]

        return hook

    hooks = [
        Hook(decoder.blocks[0], before=note("embedding")),
        Hook(decoder.norm, before=note("hidden"), after=note("normed")),
    ]
    for layer, (block, mixer) in enumerate(zip(decoder.blocks, decoder.mixers, strict=True)):
        hooks += [
            Hook(mixer, before=note("inputs", layer)),
            Hook(mixer.gates, after=note("gates", layer)),
            Hook(block.mlp, after=note("mlp", layer)),
        ]
    with watch(hooks):
        yield seen


def _on_cpu(flow: ChannelFlow) -> ChannelFlow:
    parts = flow._asdict().items()
    return flow._replace(**{name: x.detach().cpu() for name, x in parts if isinstance(x, Tensor)})


def _kept(tensor: Tensor) -> Tensor:
    """Return the one sequence of a batch of one, on the CPU."""
    return tensor[0].detach().cpu()
