"""Attention maps: which earlier tokens of one text each of a few heads looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from prismlm.errors import InputError, check_choice, check_finite, check_whole, shown
from prismlm.models.attention import (
    Group,
    attention_layers,
    head_groups,
    reading_attention,
)
from prismlm.models.decoders.mixers import chosen_layers
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import learned_positions
from prismlm.models.uncertainty_feedback import replay

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STRONGEST = 5


class Head(NamedTuple):
    """One attention head.

    Attributes:
        layer: from 0.
        head: its number in the layer, as on the second axis of the layer's weights.
        group: its kind, ``attention`` where a layer has only one.
        number: its number in its group.
    """

    layer: int
    head: int
    group: Group
    number: int

    @property
    def title(self) -> str:
        """The head in words: ``layer 6 · signal head 2``."""
        kind = "" if self.group == "attention" else f"{self.group} "
        return f"layer {self.layer} · {kind}head {self.number}"


class Link(NamedTuple):
    """The weight of one token on an earlier one, by their positions."""

    source: int
    target: int
    weight: float


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention of one head along a text of T tokens.

    Attributes:
        head: whose it is.
        tokens: the T tokens as text.
        positions: of the R tokens whose attention the rows are: all T, or those of a slice.
        weights: float32 [R, T] on the CPU; a row sums to 1 and is 0 after its own position. Those
            of a noise head sum to 1 too: λ is not in them.
    """

    head: Head
    tokens: tuple[str, ...]
    positions: tuple[int, ...]
    weights: Tensor

    def __getitem__(self, key: slice) -> AttentionMap:
        """Return the map of some rows; its columns remain all tokens."""
        return replace(self, positions=self.positions[key], weights=self.weights[key])

    def strongest(self, count: int = STRONGEST) -> tuple[Link, ...]:
        """Return the largest weights on other tokens, largest first.

        The second token can only choose between itself and the first, so it is often among them.
        """
        rows = torch.tensor(self.positions, dtype=torch.int64)
        row, column = (torch.arange(len(self.tokens)) < rows[:, None]).nonzero(as_tuple=True)
        order = self.weights[row, column].argsort(descending=True)[:count].tolist()
        return tuple(
            Link(self.positions[r], c, float(self.weights[r, c]))
            for r, c in ((int(row[i]), int(column[i])) for i in order)
        )

    def on_itself(self) -> float:
        """Return the mean weight of a token on itself; NaN for a map of the first row alone.

        The first token has nothing else to look at, so it does not count.
        """
        own = [float(row[t]) for t, row in zip(self.positions, self.weights, strict=True) if t]
        return sum(own) / len(own) if own else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json --attention``."""
        layer, head, group, number = self.head
        return {
            **{"layer": layer, "head": head, "group": group, "group_head": number},
            "tokens": list(self.tokens),
            "positions": list(self.positions),
            "weights": self.weights.tolist(),
        }


def heads_of(
    model: PreTrainedModel,
    *,
    layer: int | None = None,
    head: int | None = None,
    group: str | None = None,
) -> tuple[Head, ...]:
    """Return the heads of a model, or those of one layer, number or group.

    Args:
        model: a decoder with attention.
        layer: only this one, from 0.
        head: only this one of each layer; with ``group``, counted in it.
        group: only ``signal`` or ``noise`` heads.

    Raises:
        InputError: the model has no attention, or not that layer, group or head.
    """
    depth, groups = len(attention_layers(model)), head_groups(model)
    wanted = None if layer is None else (check_whole("the layer", layer, None),)
    layers = chosen_layers(depth, wanted)
    if group is not None:
        check_choice("the group of heads", group, [one.name for one in groups])
        groups = tuple(one for one in groups if one.name == group)
    heads = [Head(0, n, g.name, n - g.start) for g in groups for n in range(g.start, g.stop)]
    if head is not None:
        of = "" if group is None else f" {group}"
        if not 0 <= check_whole("the head", head, None) < len(heads):
            raise InputError(
                f"there is no{of} head {head}: the{of} heads of a layer are 0 to {len(heads) - 1}."
            )
        heads = [heads[head]]
    return tuple(one._replace(layer=number) for number in layers for one in heads)


def heads_at(model: PreTrainedModel, places: Sequence[tuple[int, int]]) -> tuple[Head, ...]:
    """Return the heads at (layer, head), each once, in the order given; or raise InputError."""
    for place in places:
        if not isinstance(place, (tuple, list)) or len(place) != 2:
            raise InputError(
                f"attention has {shown(place)}: expected (layer, head), such as (1, 0)."
            )
    distinct = dict.fromkeys(tuple(place) for place in places)
    return tuple(heads_of(model, layer=layer, head=head)[0] for layer, head in distinct)


def read_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    heads: Sequence[Head],
) -> tuple[AttentionMap, ...]:
    """Return the attention of ``heads`` along ``text``, in the order given.

    A token shows all of each character that it touches; one that holds only more bytes of the
    character before it is ``″``.

    Raises:
        InputError: a text of less than two tokens or more than the model reads, a tokenizer that is
            not a fast one, a layer or head that the model does not have, or weights that are not
            finite.
    """
    from prismlm.corpus.words import encode, worded

    ids, spans = encode(tokenizer, text)
    return maps_of(model, torch.tensor([ids]), worded(text, spans).tokens, heads)


def maps_of(
    model: PreTrainedModel,
    ids: Tensor,
    tokens: Sequence[str],
    heads: Sequence[Head],
    codes: Tensor | None = None,
) -> tuple[AttentionMap, ...]:
    """Return the attention of ``heads`` along ``ids`` [1, T], whose text is ``tokens``.

    With ``codes`` [1, T] of uncertainty, those that the text was read with before are fed.
    """
    weights, every = read_weights(model, ids, heads, codes), tuple(range(ids.shape[1]))
    pairs = zip(heads, weights, strict=True)
    return tuple(AttentionMap(head, tuple(tokens), every, own) for head, own in pairs)


def read_weights(
    model: PreTrainedModel, ids: Tensor, heads: Sequence[Head], codes: Tensor | None = None
) -> Tensor:
    """Return the weights of ``heads`` along ``ids`` [1, T]: float32 [heads, T, T] on the CPU.

    One forward pass, without dropout, that keeps these heads alone.
    """
    count, longest = ids.shape[1], learned_positions(model)
    if count < 2 or (longest is not None and count > longest):
        raise InputError(
            f"the text has {count:,} token(s): a map of attention needs at least 2, and "
            f"the model reads {longest or 'any number'}. Give a text of another length."
        )
    numbers: dict[int, set[int]] = {}
    for one in heads:
        # A head of another model is refused here.
        heads_of(model, layer=one.layer, head=one.head)
        numbers.setdefault(one.layer, set()).add(one.head)
    kept: dict[tuple[int, int], Tensor] = {}

    def keep(layer: int, weights: Tensor) -> None:
        for number in numbers[layer]:
            kept[layer, number] = weights[0, number].float().cpu().clone()

    with evaluating(model), reading_attention(model, keep, layers=sorted(numbers)):
        model(**replay(ids.to(model.device), codes), use_cache=False)
    read = torch.stack([kept[one.layer, one.head] for one in heads])
    check_finite("attention weights", read)
    return read
