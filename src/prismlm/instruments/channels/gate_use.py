"""How evenly gates spread over their channels: the figures that are watched while a model trains.

a_n is a gate at token n in one group of P channels, shares that add up to 1; means are over N
tokens. Groups are measured one by one, and each figure is the mean over them. Figures of one
position are of absolute values (ProtoT, A.8, Eq. 3 to 5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prismlm.errors import InputError, check_finite
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.models.evaluating import evaluating

if TYPE_CHECKING:
    from prismlm.corpus.windows import WindowBatch


@dataclass(frozen=True)
class GateUse:
    """How evenly one gate spreads over the P channels of a group, the mean over its groups.

    Source: ProtoT, A.7.1 and Table 15, whose "Gini" and "top-1" it does not define further.

    Attributes:
        gini: mean_n G(a_n), how unevenly single tokens spread, G as in A.8, Eq. 4; 0 to 1 − 1/P.
        use_gini: G(mean_n a_n), how unevenly channels are used by all tokens together, whatever
            single tokens do; 0 to 1 − 1/P.
        top_share: mean_n max_k a_nk, what a token gives to its first channel; 1/P to 1.
        top_channel_share: max_k mean_n a_nk, what the most used channel gets; 1/P to 1.
    """

    gini: float
    use_gini: float
    top_share: float
    top_channel_share: float


@dataclass(frozen=True)
class LayerUse:
    """Both gates of a layer; with shared gates they are the same.

    Attributes:
        tokens: N.
        write: the write gate.
        read: the read gate.
    """

    tokens: int
    write: GateUse
    read: GateUse


class UseTally:
    """What one gate's figures are computed from, batch by batch.

    Args:
        groups: equal parts of the channels whose figures are taken one by one.
    """

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups
        self.tokens = 0
        self._gini = 0.0
        self._top = 0.0
        self._use: Tensor | None = None

    def add(self, gate: Float[Tensor, "N R"]) -> None:
        """Take N tokens.

        Raises:
            InputError: a gate that is not finite, or a token that gives a group nothing.
        """
        found = gate.detach().double().unflatten(-1, (self.groups, -1))
        self.tokens += len(found)
        self._gini += gini(found).mean(-1).sum().item()
        self._top += found.amax(-1).mean(-1).sum().item()
        use = found.sum(0).cpu()
        self._use = use if self._use is None else self._use + use

    def result(self) -> GateUse:
        """Return the figures so far.

        Raises:
            InputError: no tokens have come.
        """
        if self._use is None or not self.tokens:
            raise InputError("no tokens were read, so there are no gates to measure.")
        use = self._use / self.tokens
        return GateUse(
            self._gini / self.tokens,
            gini(use).mean().item(),
            self._top / self.tokens,
            use.amax(-1).mean().item(),
        )


def gate_uses(model: nn.Module, batches: Iterable[WindowBatch]) -> tuple[LayerUse, ...]:
    """Return how evenly each layer's gates spread, from one forward pass a batch, without logits.

    Tokens count that their window owns. Passes are in evaluation mode.

    Raises:
        InputError: the model has no prototype mixer, or there is no text.
    """
    tallies = [(UseTally(mixer.groups), UseTally(mixer.groups)) for mixer in mixers_of(model)]
    device = next(model.parameters()).device
    with evaluating(model):
        for batch in batches:
            owned = batch.owned.to(device)
            layers = gates_of(model, batch.input_ids, batch.attention_mask)
            for (write, read), evidence in zip(tallies, layers, strict=True):
                write.add(evidence.write[owned])
                read.add(evidence.read[owned])
    return tuple(LayerUse(write.tokens, write.result(), read.result()) for write, read in tallies)


def sparsity_ratio(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return max_p |a_p| / mean_p |a_p|: 1 if all are equal, P if there is one alone; float64.

    The source calls its mean over positions the L1 sparsity ratio.

    Raises:
        InputError: activations that are not finite, or a position where all are zero.
    """
    a = _magnitudes(activations)
    return a.amax(-1) / a.mean(-1)


def gini(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return the Gini coefficient: 0 if all are equal, 1 − 1/P if there is one alone; float64.

        G = (P + 1 − 2 Σ_p (P + 1 − p) a↑_p / Σ_p a_p) / P,   a↑ ascending, p from 1

    Raises:
        InputError: as :func:`sparsity_ratio`.
    """
    a = _magnitudes(activations).sort(-1).values
    count = a.shape[-1]
    weights = torch.arange(count, 0, -1, dtype=a.dtype, device=a.device)
    return (count + 1 - 2 * (a * weights).sum(-1) / a.sum(-1)) / count


def entropy(activations: Float[Tensor, "... P"]) -> Float[Tensor, "..."]:
    """Return −Σ_p q_p ln q_p with q = |a| / Σ |a|, in nats: ln P if all are equal; float64.

    Raises:
        InputError: as :func:`sparsity_ratio`.
    """
    a = _magnitudes(activations)
    shares = a / a.sum(-1, keepdim=True)
    return -torch.xlogy(shares, shares).sum(-1)


def _magnitudes(activations: Tensor) -> Tensor:
    magnitudes = activations.detach().double().abs()
    check_finite("activations", magnitudes)
    if magnitudes.shape[-1] == 0 or not bool((magnitudes.sum(-1) > 0).all()):
        raise InputError(
            "a position has no activation at all, so it has no distribution over channels: leave "
            "padding out, and do not mask every channel."
        )
    return magnitudes
