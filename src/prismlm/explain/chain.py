"""Token → channel → prototype: which earlier tokens a prototype's activation came from, directly.

Each part is exact, and the parts sum to the activation. They are direct: what a channel gave to
later layers and SwiGLUs, and reached the head through them, counts as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from prismlm.errors import DecompositionError
from prismlm.explain.prediction import tolerance_of
from prismlm.explain.residual_stream import DirectPath, read_direct_path
from prismlm.interventions.channels import interventions_hold
from prismlm.interventions.scope import edits_hold
from prismlm.layers import PrototypeHead

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
        return self._asdict() | {
            "mlps": list(self.mlps),
            "mixers": list(self.mixers),
            "channels": channels,
        }


def chains(
    path: DirectPath, position: int, uses: Sequence[PrototypeUse], tokens: Sequence[str]
) -> tuple[PrototypeChain, ...]:
    """Split the activations of some prototypes at one position, and check the sums.

    Every part is computed by itself, none by subtraction. Their sum is compared with the model's
    own activation, and the sum over tokens with the part of each channel that is kept.

    Args:
        path: of the text.
        position: of the token after which the prediction is made.
        uses: of the prototypes, with the model's own figures.
        tokens: the text's, as readers are shown them.

    Raises:
        DecompositionError: the parts of an activation differ from it by more than 1e-3 τ, or
            2e-2 τ for models in half precision.
    """
    prototypes = torch.tensor([use.id for use in uses], dtype=torch.int64)
    parts = path.parts(position, prototypes)
    own = torch.tensor([use.activation for use in uses], dtype=torch.float64)
    _check(path, position, parts.total, own)
    found: list[PrototypeChain] = []
    for c, use in enumerate(uses):
        own_parts = parts.channels[c]
        flat = own_parts.flatten()
        kept = flat.abs().topk(min(CHANNELS_KEPT, len(flat))).indices.tolist()
        places = [divmod(int(i), own_parts.shape[1]) for i in kept if flat[i]]
        channels = (
            _channel(path, position, use, layer, channel, own_parts[layer, channel], tokens)
            for layer, channel in places
        )
        chain = PrototypeChain(
            use.id,
            use.activation,
            float(parts.embedding[c]),
            tuple(parts.mlps[c].tolist()),
            tuple(parts.channels[c].sum(1).tolist()),
            float(parts.edit[c]),
            tuple(channels),
        )
        found.append(chain)
    return tuple(found)


def _channel(
    path: DirectPath,
    position: int,
    use: PrototypeUse,
    layer: int,
    channel: int,
    part: Tensor,
    tokens: Sequence[str],
) -> ChannelUse:
    """Return what a channel gave to a prototype, and the tokens that gave most of it."""
    asked = torch.tensor([use.id]), layer, torch.tensor([channel])
    given = path.token_parts(position, *asked)[0]
    _check(path, position, given.sum()[None], part[None])
    share = float(part) / use.activation
    named = given.abs().topk(min(TOKENS_KEPT, len(given))).indices.tolist()
    return ChannelUse(
        layer,
        channel,
        float(path.half_lives(position, layer)[channel]),
        float(part),
        use.contribution * share,
        share,
        tuple(ChannelSource(s, tokens[s], float(given[s])) for s in map(int, named)),
    )


def _check(path: DirectPath, position: int, total: Tensor, own: Tensor) -> None:
    # Half-precision models round the residual stream at every sum; parts are computed in float64.
    allowed = path.scale * tolerance_of(path.embedding.dtype)
    error = (total - own).abs()
    if not bool((error <= allowed).all()):
        worst = int(torch.nan_to_num(error, nan=torch.inf).argmax())
        raise DecompositionError(
            f"at position {position} the direct parts of an activation sum to "
            f"{float(total[worst]):.6g} and the model's own is {float(own[worst]):.6g}: the model "
            "was changed since the text was explained, or its weights are not finite."
        )


class ChainsOfText:
    """The chains of one text's steps, each split when it is looked at.

    The model runs once more for them, when the first is looked at; where an edit or an
    intervention holds, at once: later it may hold no more.
    """

    def __init__(
        self,
        model: nn.Module,
        head: PrototypeHead,
        input_ids: Int64[Tensor, " T"],
        codes: Int64[Tensor, "1 T"] | None = None,
    ) -> None:
        self._read = (model, head, input_ids, codes)
        if edits_hold() or interventions_hold():
            _ = self.path

    @cached_property
    def path(self) -> DirectPath:
        """What the text's hidden states are the sum of."""
        return read_direct_path(*self._read)

    def of(
        self, position: int, uses: Sequence[PrototypeUse], tokens: Sequence[str]
    ) -> tuple[PrototypeChain, ...]:
        """Return the chains of some prototypes at one position."""
        return chains(self.path, position, uses, tokens)
