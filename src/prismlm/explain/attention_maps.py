"""Attention maps: how much each token of a text attends to those before it, for chosen heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from prismlm.errors import InputError, check_choice, check_finite
from prismlm.models.attention import Group, attention_layers, head_groups, reading_attention
from prismlm.models.decoders.protot import chosen_layers
from prismlm.models.device import learned_positions
from prismlm.models.watch import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Head(NamedTuple):
    """One attention head; models with heads of one kind have the group ``attention``."""

    layer: int
    head: int  # index in the layer
    group: Group
    group_head: int  # index in the group of the layer

    @property
    def title(self) -> str:
        """The head as ``layer 6 · signal head 2``."""
        kind = "" if self.group == "attention" else f"{self.group} "
        return f"layer {self.layer} · {kind}head {self.group_head}"


class Link(NamedTuple):
    """The attention weight of the token at ``source`` on the earlier token at ``target``."""

    source: int
    target: int
    weight: float


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention of one head along a text of T tokens."""

    head: Head
    # Float32 [T, T] on the CPU; a row sums to 1, in noise heads too (λ is not applied).
    weights: Tensor
    tokens: tuple[str, ...]  # as text

    def strongest(self, count: int = 5) -> tuple[Link, ...]:
        """Return the largest weights on other tokens, largest first."""
        rows, columns = torch.tril_indices(len(self.weights), len(self.weights), -1)
        order = self.weights[rows, columns].argsort(descending=True)[:count]
        pairs = zip(rows[order].tolist(), columns[order].tolist(), strict=True)
        return tuple(Link(row, column, float(self.weights[row, column])) for row, column in pairs)

    def on_itself(self) -> float:
        """Return the mean weight of a token on itself, without the first; NaN if it is alone."""
        return float(self.weights.diagonal()[1:].mean())

    def to_dict(self) -> dict[str, Any]:
        """Return the map as JSON values."""
        values = {"tokens": list(self.tokens), "weights": self.weights.tolist()}
        return self.head._asdict() | values


def heads_of(
    model: PreTrainedModel,
    *,
    layer: int | None = None,
    head: int | None = None,
    group: str | None = None,
) -> tuple[Head, ...]:
    """Return the heads of a model, layer by layer.

    ``layer`` selects one layer, ``group`` the ``signal`` or ``noise`` heads, and ``head`` the head
    of this index in each layer, or in ``group`` of each layer.
    """
    layers = chosen_layers(len(attention_layers(model)), None if layer is None else (layer,))
    groups = head_groups(model)
    if group is not None:
        check_choice("the group of heads", group, [kind.name for kind in groups])
        groups = tuple(kind for kind in groups if kind.name == group)
    heads = [(kind, n) for kind in groups for n in range(kind.start, kind.stop)]
    if head is not None:
        if not 0 <= head < len(heads):
            raise InputError(f"there is no head {head}: expected 0 to {len(heads) - 1}.")
        heads = [heads[head]]
    return tuple(Head(i, n, kind.name, n - kind.start) for i in layers for kind, n in heads)


def read_maps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, heads: Sequence[Head]
) -> tuple[AttentionMap, ...]:
    """Return the attention of ``heads`` along ``text``.

    A token's text has every character that one of its bytes belongs to; a token that only continues
    the character of the token before it is ``″``.
    """
    from prismlm.corpus.pieces import encode, token_words

    ids, spans = encode(tokenizer, text)
    tokens = tuple(token_words(text, spans).tokens)
    weights = read_weights(model, torch.tensor([ids]), heads)
    return tuple(AttentionMap(*one, tokens) for one in zip(heads, weights, strict=True))


def read_weights(model: PreTrainedModel, ids: Tensor, heads: Sequence[Head]) -> Tensor:
    """Return the weights of ``heads`` along ``ids`` [1, T]: float32 [heads, T, T] on the CPU.

    One forward pass, without dropout, which stores these heads only.
    """
    count, longest = ids.shape[1], learned_positions(model)
    if count < 2 or (longest is not None and count > longest):
        raise InputError(
            f"the text has {count:,} token(s): a map of attention needs at least 2, and "
            f"the model reads {longest or 'any number'}. Give a text of another length."
        )
    # A layer that never ran leaves NaN, which is refused below.
    result = torch.full((len(heads), count, count), torch.nan)

    def store(layer: int, weights: Tensor) -> None:
        for row, head in zip(result, heads, strict=True):
            if head.layer == layer:
                row.copy_(weights[0, head.head])

    layers = sorted({head.layer for head in heads})
    with evaluating(model), reading_attention(model, store, layers=layers):
        model(input_ids=ids.to(model.device), use_cache=False)
    check_finite("attention weights", result)
    return result
