"""Token → channel → prototype: which earlier tokens a prototype's activation came from, directly.

The last hidden state before the last norm is a sum, h = embedding + Σ_l (mixer_l + SwiGLU_l), and
z = g ⊙ h / rms(h). With rms(h) and ‖z‖ as they are at the position, the activation of a prototype
is linear in h, and so the sum of

    part = τ (g ⊙ v / rms(h))·p_i / (‖z‖ ‖p_i‖)

over everything v that was added to h. A mixer's output is itself the sum of what its channels read,
and a channel's of what earlier tokens wrote into it. Each part is computed by itself, none by
subtraction, and their sum is compared with the model's own activation. They are direct parts: what
a channel gave to later layers and SwiGLUs, and reached z through them, counts as theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from prismlm.errors import DecompositionError, InputError
from prismlm.explain.prediction import tolerance_of
from prismlm.interventions.channels import interventions_active
from prismlm.interventions.plan import edits_active
from prismlm.layers import PrototypeHead, PrototypeMixer
from prismlm.models.decoders.protot import half_life
from prismlm.models.decoders.recurrent_decoder import RecurrentBlock, RecurrentModel
from prismlm.models.device import check_sequence
from prismlm.models.seam import capture
from prismlm.models.uncertainty_feedback import replay
from prismlm.models.watch import Hook, watch
from prismlm.ops.channel_parts import ChannelFlow, channel_parts, token_parts
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.explain.steps import PrototypeUse

# Of all layers' channels, for each prototype; and of each of those the tokens that are named.
CHANNELS_KEPT = 3
TOKENS_KEPT = 3


class ChannelSource(NamedTuple):
    """What one earlier token gave to a prototype through one channel.

    Attributes:
        position: of the token, from 0.
        token: as it stands in the text.
        part: of the channel's ``activation_part``.
    """

    position: int
    token: str
    part: float


class ChannelUse(NamedTuple):
    """What one channel added directly to a prototype's activation.

    Attributes:
        layer, channel: from 0.
        half_life: −ln 2 / ln β, in positions, of the decay at the position explained.
        activation_part: may be negative.
        contribution: the same part of the prototype's contribution to the target's logit.
        share: activation_part / activation. Shares of all parts sum to 1; one may be below 0 or
            above 1.
        tokens: those with the largest parts, either way; all of them sum to ``activation_part``.
    """

    layer: int
    channel: int
    half_life: float
    activation_part: float
    contribution: float
    share: float
    tokens: tuple[ChannelSource, ...]


class PrototypeChain(NamedTuple):
    """The direct parts of one prototype's activation at one position.

        activation = embedding + Σ mlps + Σ mixers + edit

    Attributes:
        prototype: its number.
        activation: the model's own, τ cos(z, p).
        embedding: the part of the embedding of the token just read.
        mlps: the part of each layer's SwiGLU.
        mixers: the part of each layer's mixer, which is the sum over its channels.
        edit: the part that an edit of the hidden state added.
        channels: those with the largest parts, either way, of all layers.
    """

    prototype: int
    activation: float
    embedding: float
    mlps: tuple[float, ...]
    mixers: tuple[float, ...]
    edit: float
    channels: tuple[ChannelUse, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as ``prismlm explain --json`` prints them."""
        channels = [
            use._asdict() | {"tokens": [source._asdict() for source in use.tokens]}
            for use in self.channels
        ]
        lists = {"mlps": list(self.mlps), "mixers": list(self.mixers), "channels": channels}
        return self._asdict() | lists


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

    Attributes:
        head: whose prototypes.
        embedding: what entered the first layer.
        mlps: what each layer's SwiGLU added.
        flows: what went through each layer's channels.
        first_decays: each layer's decays at the first position, which the flow of one token lacks.
        outputs: each layer's map from channels to the residual stream.
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

    @property
    def tolerance(self) -> float:
        """How far sums may be off: half-precision models round the stream at every sum."""
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
        return self._directions(position, prototypes)[1] @ self.outputs[layer].double()

    def half_lives(self, position: int, layer: int) -> Float[Tensor, " R"]:
        """Return −ln 2 / ln β, in positions, of the decay that a position saw; float64.

        The first position saw none, and has that of its own.
        """
        self._check(position)
        if position == 0:
            return half_life(self.first_decays[layer])
        sums = self.flows[layer].log_decay
        return half_life((sums[position] - sums[position - 1]).exp())

    def _check(self, position: int) -> None:
        count = len(self.hidden)
        if not 0 <= position < count:
            raise InputError(f"there is no position {position}: the text has {count} tokens.")

    def _directions(self, position: int, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what z, and what h, is multiplied by to give activations: [C, d] each."""
        self._check(position)
        bank, state = self.head.prototypes.detach(), self.states[position].double()
        chosen = bank[prototypes.to(bank.device)].double().cpu()
        scale = float(self.head.scale.detach())
        unit = scale * chosen * inverse_norms(chosen) * inverse_norms(state)
        mean_square = self.hidden[position].double().square().mean()
        return unit, unit * self.gain.double() * (mean_square + self.epsilon).rsqrt()


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

    Edits and interventions that hold are seen. Memory grows with T, not with T². With ``codes`` of
    uncertainty, those that the sequence was read with before are fed.

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
    flows, first_decays = [], []
    for layer, mixer in enumerate(decoder.mixers):
        inputs = seen["inputs", layer]
        flow = mixer.flow(inputs, seen["gates", layer])
        tensors = {k: v.detach().cpu() for k, v in flow._asdict().items() if isinstance(v, Tensor)}
        flows.append(flow._replace(**tensors))
        first_decays.append(mixer.decay_of(inputs[:, :1]).expand(1, 1, -1)[0, 0].cpu())
    # The one sequence of a batch of one.
    stream = {key: value[0].detach().cpu() for key, value in seen.items() if key[0] != "gates"}
    return DirectPath(
        head=head,
        embedding=stream["embedding", 0],
        mlps=tuple(stream["mlp", layer] for layer in range(len(decoder.blocks))),
        flows=tuple(flows),
        first_decays=tuple(first_decays),
        outputs=tuple(mixer.output_map.detach().cpu() for mixer in decoder.mixers),
        hidden=stream["hidden", 0],
        normed=stream["normed", 0],
        states=captured.z[0].detach().cpu(),
        gain=decoder.norm.weight.detach().cpu(),
        epsilon=decoder.norm.eps or 0.0,
    )


@contextmanager
def _watching(decoder: MixerDecoder) -> Iterator[dict[tuple[str, int], Any]]:
    """Note what this thread's passes through a decoder add to the residual stream, by layer."""
    seen: dict[tuple[str, int], Any] = {}

    def note(name: str, layer: int = 0) -> Callable[..., None]:
        """Note the output of a module after it has run, or its first input before."""

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


def chains(
    path: DirectPath, position: int, uses: Sequence[PrototypeUse], tokens: Sequence[str]
) -> tuple[PrototypeChain, ...]:
    """Split the activations of some prototypes at one position, and check the sums.

    Args:
        path: of the text.
        position: of the token after which the prediction is made.
        uses: of the prototypes, with the model's own figures.
        tokens: the text's, as readers are shown them.

    Raises:
        DecompositionError: the parts of an activation differ from it by more than 1e-3 τ, or
            2e-2 τ for models in half precision.
    """
    parts = path.parts(position, torch.tensor([use.id for use in uses], dtype=torch.int64))
    for use, total in zip(uses, parts.total.tolist(), strict=True):
        _check_sum(path, position, total, use.activation)

    def channel(use: PrototypeUse, layer: int, number: int, part: float) -> ChannelUse:
        asked = torch.tensor([use.id]), layer, torch.tensor([number])
        given = path.token_parts(position, *asked)[0]
        _check_sum(path, position, float(given.sum()), part)
        largest = given.abs().topk(min(TOKENS_KEPT, len(given))).indices.tolist()
        return ChannelUse(
            layer,
            number,
            float(path.half_lives(position, layer)[number]),
            part,
            use.contribution * part / use.activation,
            part / use.activation,
            tuple(ChannelSource(s, tokens[s], float(given[s])) for s in map(int, largest)),
        )

    result: list[PrototypeChain] = []
    for use, embedding, mlps, own, edit in zip(uses, *parts, strict=True):
        flat = own.flatten()
        largest = flat.abs().topk(min(CHANNELS_KEPT, len(flat))).indices.tolist()
        named = [(*divmod(i, own.shape[1]), float(flat[i])) for i in map(int, largest) if flat[i]]
        chain = PrototypeChain(
            use.id,
            use.activation,
            float(embedding),
            tuple(mlps.tolist()),
            tuple(own.sum(1).tolist()),
            float(edit),
            tuple(channel(use, *of) for of in named),
        )
        result.append(chain)
    return tuple(result)


def _check_sum(path: DirectPath, position: int, total: float, own: float) -> None:
    if not abs(total - own) <= path.tolerance:
        raise DecompositionError(
            f"at position {position} the direct parts of an activation sum to {total:.6g} and the "
            f"model's own is {own:.6g}: the model was changed since the text was explained, or its "
            "weights are not finite."
        )


class ChainsOfText:
    """The chains of one text's steps, each split when it is looked at.

    The model runs once more for them, when the first is looked at; where an edit or an
    intervention holds, at once: later it may hold no more.
    """

    def __init__(self, *text: Any) -> None:
        self._text = text
        if edits_active() or interventions_active():
            _ = self.path

    @cached_property
    def path(self) -> DirectPath:
        """What the text's hidden states are the sum of."""
        return read_direct_path(*self._text)

    def of(
        self, position: int, uses: Sequence[PrototypeUse], tokens: Sequence[str]
    ) -> tuple[PrototypeChain, ...]:
        """Return the chains of some prototypes at one position."""
        return chains(self.path, position, uses, tokens)


def chains_of(
    model: nn.Module, head: PrototypeHead, input_ids: Tensor, codes: Tensor | None
) -> ChainsOfText | None:
    """Return the chains of a text [T]; None for models that have none.

    Fitted weights are no sum over a position's tokens: each depends on the other prototypes.
    """
    if head.weights != "cosine" or mixer_decoder_of(model) is None:
        return None
    return ChainsOfText(model, head, input_ids, codes)
