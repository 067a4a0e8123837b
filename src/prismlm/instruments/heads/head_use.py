"""How far each head looks and what it looks at, over text: means over query positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from prismlm.errors import InputError, check_finite, check_whole
from prismlm.instruments.forward import collect
from prismlm.models.attention import (
    Group,
    attention_layers,
    head_groups,
    reading_attention,
)
from prismlm.models.decoders.mixers import chosen_layers
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.windows import WindowBatch

LEAST_VISIBLE = 16
NEAR = 4
"""The farthest distance that counts as near."""


@dataclass(frozen=True)
class HeadFigures:
    """Means over query positions of a head's attention a_ij, j ≤ i, which sums to 1 over j.

    Attributes:
        distance: Σ_j a_ij (i − j), in positions.
        distance_beyond_self: the same over attention to other positions than i, relative to how
            much of it there is; 0 if there is none.
        entropy: −Σ_j a_ij ln a_ij, in nats.
        relative_entropy: entropy / ln n_i, n_i the number of visible positions; 0 to 1.
        self_share: a_ii.
        near_share: Σ a_ij over distances 1 to 4.
        first_share: a on the first token of the window, the "attention sink"; it counts at its
            distance too.
        spectrum: Σ a_ij over each bin of distances; sums to 1.
    """

    distance: float
    distance_beyond_self: float
    entropy: float
    relative_entropy: float
    self_share: float
    near_share: float
    first_share: float
    spectrum: tuple[float, ...]


@dataclass(frozen=True)
class HeadUse(HeadFigures):
    """The figures of one head.

    Attributes:
        layer: from 0.
        head: its place in the layer's attention weights, from 0; signal heads come before noise.
        group: "signal", "noise", or "attention" in a model whose heads are of one kind.
    """

    layer: int
    head: int
    group: Group


@dataclass(frozen=True)
class HeadUses:
    """All heads of some layers, with what attention that does not choose would give.

    Attributes:
        tokens: tokens read.
        windows: windows read.
        queries: query positions that the means are over.
        least_visible: a query position counts from so many visible positions on.
        bins: the least and greatest distance of each bin of a spectrum.
        uniform: the figures of 1/n_i for every visible position, at the same query positions.
        heads: by layer, then head.
    """

    tokens: int
    windows: int
    queries: int
    least_visible: int
    bins: tuple[tuple[int, int], ...]
    uniform: HeadFigures
    heads: tuple[HeadUse, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Which layers were read."""
        return tuple(sorted({head.layer for head in self.heads}))


def distance_bins(length: int) -> tuple[tuple[int, int], ...]:
    """Return the bins of a spectrum up to distance T − 1: 0, 1, 2, 3–4, 5–8, 9–16, …

    The last is as wide as the others of its kind would be.
    """
    bins = [(0, 0)]
    high = 1
    while bins[-1][1] < length - 1:
        bins.append((bins[-1][1] + 1, high))
        high *= 2
    return tuple(bins)


def head_uses(
    model: PreTrainedModel,
    batches: Iterable[WindowBatch],
    *,
    layers: Sequence[int] | None = None,
    least_visible: int = LEAST_VISIBLE,
    progress: Reporter = SILENT,
) -> HeadUses:
    """Return how far each head looks and what it looks at.

    Queries are the positions that their window owns and that see at least ``least_visible``
    tokens of it, themselves among them: at the start of a window every head looks near, and to
    the first token, whatever it does elsewhere. Layers with a sliding window count as seeing the
    whole window. One layer's weights of one batch are held at a time.

    Args:
        model: any decoder with attention.
        batches: text; padding before or behind a window counts nothing.
        layers: which, from 0; None for all.
        least_visible: at least 2, since the entropy of a single choice is relative to nothing.
        progress: shows the reading.

    Raises:
        InputError: a model without attention or without that layer, windows longer than its
            positions, no query that sees enough, or weights that are not finite.
    """
    collector = HeadUseCollector(model, layers=layers, least_visible=least_visible)
    collect(model, batches, collector, title="Reading heads", progress=progress)
    return collector.result()


class HeadUseCollector:
    """Collects the figures of :func:`head_uses` while the caller runs the forward passes.

    Args:
        model, layers, least_visible: as of :func:`head_uses`.

    Raises:
        InputError: a model without attention, or least_visible below 2.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layers: Sequence[int] | None = None,
        least_visible: int = LEAST_VISIBLE,
    ) -> None:
        check_whole("least_visible", least_visible, 2)
        self._model = model
        self._groups = head_groups(model)
        chosen = chosen_layers(len(attention_layers(model)), layers)
        self._layers = tuple(sorted(set(chosen)))
        self.least_visible = least_visible
        heads = self._groups[-1].stop
        self._tallies = {layer: AttentionTally(heads) for layer in self._layers}
        self._uniform = AttentionTally(1)
        self._tokens = self._windows = 0
        self._chosen = self._visible = torch.empty(0)

    @property
    def queries(self) -> int:
        """How many query positions saw enough so far."""
        return self._uniform.queries

    def listening(self) -> AbstractContextManager[None]:
        """Take in the attention weights of the layers during the block.

        Raises:
            InputError: the model has not that layer.
        """
        return reading_attention(self._model, self._read, layers=self._layers)

    def begin(self, batch: WindowBatch) -> None:
        """Say which batch the next forward pass is of."""
        mask = batch.attention_mask.to(self._model.device)
        self._visible = mask.cumsum(1) * mask
        enough = self._visible >= self.least_visible
        self._chosen = batch.owned.to(self._model.device) & enough
        self._uniform.add(_uniform(mask, self._visible), self._chosen, self._visible)
        self._tokens += int(batch.owned.sum())
        self._windows += int(batch.owned.any(1).sum())

    def _read(self, layer: int, weights: Tensor) -> None:
        self._tallies[layer].add(weights, self._chosen, self._visible)

    def result(self) -> HeadUses:
        """Return the figures of each head.

        Raises:
            InputError: no query saw enough.
        """
        if not self.queries:
            raise InputError(
                f"none of {self._tokens} tokens sees {self.least_visible} tokens of its window: "
                "read longer texts in longer windows, or count queries that see fewer."
            )
        bins = distance_bins(self._uniform.profile.shape[1])
        heads = tuple(
            HeadUse(**figures_of(tally, head, bins), layer=layer, head=head, group=group.name)
            for layer, tally in self._tallies.items()
            for group in self._groups
            for head in range(group.start, group.stop)
        )
        uniform = HeadFigures(**figures_of(self._uniform, 0, bins))
        return HeadUses(
            self._tokens,
            self._windows,
            self.queries,
            self.least_visible,
            bins,
            uniform,
            heads,
        )


def _uniform(mask: Tensor, visible: Tensor) -> Tensor:
    """Return 1/n_i on the n_i positions that i sees, [B, 1, T, T]."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool, device=mask.device).tril()
    sees = (causal & mask[:, None]).double()
    return (sees / visible.clamp_min(1)[:, :, None])[:, None]


def figures_of(
    tally: AttentionTally, head: int, bins: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """Return the fields of :class:`HeadFigures` of one head."""
    profile = tally.profile[head] / tally.queries
    distances = torch.arange(len(profile), dtype=torch.float64)
    distance = float(profile @ distances)
    beyond = float(profile[1:].sum())
    return {
        "distance": distance,
        "distance_beyond_self": distance / beyond if beyond > 0 else 0.0,
        "entropy": float(tally.entropy[head]) / tally.queries,
        "relative_entropy": float(tally.relative_entropy[head]) / tally.queries,
        "self_share": float(profile[0]),
        "near_share": float(profile[1 : NEAR + 1].sum()),
        "first_share": float(tally.first[head]) / tally.queries,
        "spectrum": tuple(float(profile[low : high + 1].sum()) for low, high in bins),
    }


class AttentionTally:
    """What the heads of one layer did, summed over queries; float64, on the CPU.

    Attributes:
        queries: how many query positions were added.
        profile: attention by distance, [H, T] for the longest T so far: Σ over queries i of
            a(i, i − δ).
        entropy: Σ of −Σ_j a_ij ln a_ij, nats [H].
        relative_entropy: Σ of entropy / ln n_i for n_i visible positions [H].
        first: Σ of a on the window's first token [H].
    """

    def __init__(self, heads: int) -> None:
        self.queries = 0
        self.profile = torch.zeros(heads, 0, dtype=torch.float64)
        self.entropy = torch.zeros(heads, dtype=torch.float64)
        self.relative_entropy = torch.zeros(heads, dtype=torch.float64)
        self.first = torch.zeros(heads, dtype=torch.float64)

    def add(
        self,
        weights: Float[Tensor, "B H T T"],
        chosen: Bool[Tensor, "B T"],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        """Take the queries ``chosen``, which see ``visible`` positions each, themselves among them.

        Windows may have padding before or behind, not within.

        Raises:
            InputError: a weight that is not finite.
        """
        queries = [row.nonzero()[:, 0] for row in chosen]
        self.queries += sum(map(len, queries))
        length = weights.shape[-1]
        longest = max(length, self.profile.shape[1])
        self.profile = F.pad(self.profile, (0, longest - self.profile.shape[1]))
        # One head at a time: what is made of its weights is larger than they are.
        for head in range(weights.shape[1]):
            self._add_head(head, weights[:, head], queries, visible)

    def _add_head(
        self,
        head: int,
        weights: Float[Tensor, "B T T"],
        queries: list[Tensor],
        visible: Int64[Tensor, "B T"],
    ) -> None:
        summed = torch.zeros(weights.shape[1:], dtype=torch.float64, device=weights.device)
        dtype = torch.promote_types(weights.dtype, torch.float32)
        for row, own in enumerate(queries):
            if not len(own):
                continue
            # What padding attends to is no matter, finite or not.
            attention = weights[row, own].to(dtype)
            summed[own] += attention
            entropy = torch.special.entr(attention).sum(-1, dtype=torch.float64)
            seen = visible[row, own]
            self.entropy[head] += entropy.sum().cpu()
            self.relative_entropy[head] += (entropy / seen.double().log()).sum().cpu()
            start = int(own[0] - seen[0] + 1)
            self.first[head] += attention[:, start].sum(dtype=torch.float64).cpu()
        profile = _diagonals(summed).cpu()
        check_finite("attention weights", profile)
        self.profile[head, : len(profile)] += profile


def _diagonals(summed: Float[Tensor, "T T"]) -> Float[Tensor, " T"]:
    """Return the sums over i of the elements (i, i − δ) for δ = 0 … T − 1."""
    length = len(summed)
    # With T zeros after each mirrored row and rows read 2T − 1 wide, row i shifts by i, so that
    # the column of an element is T − 1 + δ.
    wide = F.pad(summed.flip(-1), (0, length)).flatten()[:-length]
    return wide.view(length, 2 * length - 1).sum(0)[length - 1 :]
