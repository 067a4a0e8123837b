"""Token → channel → prototype: which earlier tokens a prototype's activation came from, directly.

The last hidden state before the last norm is a sum, h = embedding + Σ_l (mixer_l + SwiGLU_l), and
z = g ⊙ h / rms(h). With rms(h) and ‖z‖ as they are at the position, the activation of a prototype
is linear in h, and so the sum of

    part = τ (g ⊙ v / rms(h))·p_i / (‖z‖ ‖p_i‖)

over everything v that was added to h. A mixer's output is itself the sum of its channels' outputs,
and a channel's output a sum over the earlier tokens that wrote to it. Each part is computed by
itself, none by subtraction, and their sum is compared with the model's own activation. Parts are
direct: what a channel adds to z through later layers and SwiGLUs counts as theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import DecompositionError, InputError
from prismlm.explain.prediction import PrototypeUse, tolerance_of
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.decoders.own_decoder import RecurrentModel
from prismlm.models.decoders.protot import half_life
from prismlm.models.device import check_sequence
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import replay
from prismlm.models.watch import Hook, evaluating, watch
from prismlm.ops.channel_parts import ChannelFlow, channel_parts, token_parts
from prismlm.ops.prototype_head.routing import inverse_norms

# Channels named for each prototype, and tokens named for each channel.
CHANNELS_NAMED = 3
TOKENS_NAMED = 3


@dataclass(frozen=True)
class ChannelSource:
    """The ``part`` of a channel's ``activation_part`` that came from one earlier token."""

    position: int
    token: str
    part: float


@dataclass(frozen=True)
class ChannelUse:
    """What one channel added directly to a prototype's activation."""

    layer: int  # from 0
    channel: int
    half_life: float  # −ln 2 / ln β, in positions, of the decay at the position explained
    activation_part: float  # may be negative
    contribution: float  # the same part of the prototype's contribution to the target's logit
    share: float  # activation_part / activation; shares of all parts sum to 1
    # Those with the parts of largest size; all tokens sum to ``activation_part``.
    tokens: tuple[ChannelSource, ...]


@dataclass(frozen=True)
class PrototypeChain:
    """A prototype's activation at one position: embedding + Σ mlps + Σ mixers + edit."""

    prototype: int  # its number
    activation: float  # the model's own, τ cos(z, p)
    embedding: float  # the part of the embedding of the token just read
    # The parts of each layer's SwiGLU, and of its mixer, the sum over its channels.
    mlps: tuple[float, ...]
    mixers: tuple[float, ...]
    edit: float  # the part that an edit of the hidden state added
    channels: tuple[ChannelUse, ...]  # those with the parts of largest size, of all layers


class ActivationParts(NamedTuple):
    """The activations of C prototypes at one position, split; float64. L layers, R channels."""

    embedding: Float[Tensor, " C"]
    mlps: Float[Tensor, "C L"]
    channels: Float[Tensor, "C L R"]
    edit: Float[Tensor, " C"]  # what an edit of the hidden state added

    @property
    def total(self) -> Float[Tensor, " C"]:
        """The sum of all parts: τ cos(z, p)."""
        return self.embedding + self.mlps.sum(1) + self.channels.sum((1, 2)) + self.edit


@dataclass(frozen=True, eq=False)
class DirectPath:
    """What one sequence of T positions added to its residual stream, on the CPU."""

    head: PrototypeHead  # whose prototypes
    embedding: Float[Tensor, "T d"]  # what entered the first layer
    mlps: Float[Tensor, "L T d"]  # what each layer's SwiGLU added
    flows: tuple[ChannelFlow, ...]  # what each layer's channels wrote and read
    # Each layer's map from channels to the residual stream.
    outputs: tuple[Float[Tensor, "d D"], ...]
    hidden: Float[Tensor, "T d"]  # h
    # z from the last norm, and as the output embedding gets it, edited or not.
    normed: Float[Tensor, "T d"]
    states: Float[Tensor, "T d"]
    gain: Float[Tensor, " d"]  # of the last norm
    epsilon: float

    @property
    def tolerance(self) -> float:
        """The error allowed of sums: half-precision models round the stream at every sum."""
        return float(self.head.scale.detach()) * tolerance_of(self.embedding.dtype)

    def parts(self, position: int, prototypes: Int64[Tensor, " C"]) -> ActivationParts:
        """Split the activations τ cos(z, p_i) of some prototypes at one position."""
        unit, direction = self._directions(position, prototypes)
        edited = self.states[position].double() - self.normed[position].double()
        channels = [
            channel_parts(flow, position, direction @ output.double())
            for flow, output in zip(self.flows, self.outputs, strict=True)
        ]
        return ActivationParts(
            direction @ self.embedding[position].double(),
            direction @ self.mlps[:, position].double().T,
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

        With a convolution on the values, the token credited is the one that gave the value.
        """
        along = self._directions(position, prototypes)[1] @ self.outputs[layer].double()
        return token_parts(self.flows[layer], position, along, channels)

    def _directions(self, position: int, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors whose products with z, and with h, are activations: [C, d] each."""
        bank, state = self.head.prototypes.detach(), self.states[position].double()
        chosen = bank[prototypes.to(bank.device)].double().cpu()
        scale = float(self.head.scale.detach())
        unit = scale * chosen * inverse_norms(chosen) * inverse_norms(state)
        mean_square = self.hidden[position].double().square().mean()
        return unit, unit * self.gain.double() * (mean_square + self.epsilon).rsqrt()


def mixer_decoder_of(model: nn.Module) -> RecurrentModel | None:
    """Return the decoder in a model, or None unless all of its layers have prototype mixers."""
    decoder = next((part for part in model.modules() if isinstance(part, RecurrentModel)), None)
    if decoder is None or not isinstance(decoder.norm, nn.RMSNorm) or not len(decoder.layers):
        return None
    mixers = (getattr(block, "mixer", None) for block in decoder.layers)
    return decoder if all(isinstance(mixer, PrototypeMixer) for mixer in mixers) else None


@torch.no_grad()
def read_direct_path(
    model: nn.Module,
    head: PrototypeHead,
    input_ids: Int64[Tensor, " T"],
    codes: Int64[Tensor, "1 T"] | None = None,
) -> DirectPath:
    """Run a model once over one sequence, and return what its last hidden states are the sum of.

    Edits and interventions in force apply. Memory grows with T, not with T². ``codes`` are those
    of uncertainty feedback from an earlier pass over the sequence, to be fed again.
    """
    decoder: Any = mixer_decoder_of(model)
    if decoder is None:
        raise InputError(
            f"{type(model).__name__} is not a decoder of prototype mixers, so it has no channels "
            "to split its states over."
        )
    check_sequence(input_ids)
    blocks, norm = list(decoder.layers), decoder.norm
    seen: dict[str, list[Any]] = defaultdict(list)

    def store(name: str) -> Callable[..., None]:
        """Store a module's output if the hook is after it, else its first input.

        Of the one sequence, but inputs and gates, which are needed as they are.
        """

        def hook(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            value = (*output, args[0])[0]
            seen[name].append(value if name in ("inputs", "gates") else value[0].cpu())

        return hook

    hooks = [
        Hook(blocks[0], before=store("embedding")),
        Hook(norm, before=store("hidden"), after=store("normed")),
    ]
    for block in blocks:
        hooks += [
            Hook(block.mixer, before=store("inputs")),
            Hook(block.mixer.gates, after=store("gates")),
            Hook(block.mlp, after=store("mlps")),
        ]
    with evaluating(model), watch(hooks), capture(model, logits=False) as captured:
        model(**replay(input_ids[None], codes), use_cache=False)
    mixers = [block.mixer for block in blocks]
    flows = map(PrototypeMixer.flow, mixers, seen["inputs"], seen["gates"])
    return DirectPath(
        head=head,
        embedding=seen["embedding"][0],
        mlps=torch.stack(seen["mlps"]),
        flows=tuple(map(_on_cpu, flows)),
        outputs=tuple(mixer.output_map.detach().cpu() for mixer in mixers),
        hidden=seen["hidden"][0],
        normed=seen["normed"][0],
        states=captured.z[0].detach().cpu(),
        gain=norm.weight.detach().cpu(),
        epsilon=norm.eps or 0.0,
    )


def _on_cpu(flow: ChannelFlow) -> ChannelFlow:
    tensors = {k: v.detach().cpu() for k, v in flow._asdict().items() if isinstance(v, Tensor)}
    return flow._replace(**tensors)


def chains(
    path: DirectPath, position: int, uses: Sequence[PrototypeUse], tokens: Sequence[str]
) -> tuple[PrototypeChain, ...]:
    """Split the activations of some prototypes at one position, and check the sums."""
    parts = path.parts(position, torch.tensor([use.id for use in uses], dtype=torch.int64))
    result: list[PrototypeChain] = []
    for i, (use, total) in enumerate(zip(uses, parts.total.tolist(), strict=True)):
        if not abs(total - use.activation) <= path.tolerance:
            raise DecompositionError(
                f"at position {position} the direct parts of an activation sum to {total:.6g} and "
                f"the model's own is {use.activation:.6g}: the model does not repeat its states, "
                "or its weights are not finite."
            )
        by_channel = parts.channels[i]
        largest = ((at, float(by_channel[at])) for at in _largest(by_channel, CHANNELS_NAMED))
        chain = PrototypeChain(
            use.id,
            use.activation,
            float(parts.embedding[i]),
            tuple(parts.mlps[i].tolist()),
            tuple(by_channel.sum(1).tolist()),
            float(parts.edit[i]),
            tuple(_channel_use(path, position, use, *one, tokens) for one in largest if one[1]),
        )
        result.append(chain)
    return tuple(result)


def _channel_use(
    path: DirectPath,
    position: int,
    use: PrototypeUse,
    channel: tuple[int, ...],
    part: float,
    tokens: Sequence[str],
) -> ChannelUse:
    """Split a channel's part of an activation over the earlier tokens."""
    layer, number = channel
    by_token = path.token_parts(position, torch.tensor([use.id]), layer, torch.tensor([number]))[0]
    decays = path.flows[layer].log_decay[position - 1 : position + 1, number]
    return ChannelUse(
        layer,
        number,
        float(half_life((decays[1:] - decays[:1]).exp())),
        part,
        use.contribution * part / use.activation,
        part / use.activation,
        tuple(
            ChannelSource(source, tokens[source], float(by_token[source]))
            for (source,) in _largest(by_token, TOKENS_NAMED)
        ),
    )


def _largest(values: Tensor, count: int) -> list[tuple[int, ...]]:
    """Return the indices of the values of largest size."""
    order = values.flatten().abs().topk(min(count, values.numel())).indices
    return [*zip(*(i.tolist() for i in torch.unravel_index(order, values.shape)), strict=True)]
