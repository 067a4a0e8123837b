"""Concepts of channels: the words that write into each of them most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prismlm.errors import InputError
from prismlm.lens.labels.categories import Vocabulary
from prismlm.models.decoders.protot import check_channel, check_layer
from prismlm.probes.channels.activations import Activations
from prismlm.probes.channels.concepts import whole_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class TokenGates:
    """Write gates by token of V, float64.

    Attributes:
        count: how often each token was read [V].
        sums: Σ write over the positions of each token, of each layer [V, R].
        deviations: of each channel's write gate over positions, of each layer [R].
    """

    count: Tensor
    sums: tuple[Tensor, ...]
    deviations: tuple[Tensor, ...]

    @property
    def positions(self) -> int:
        """How many tokens were read."""
        return int(self.count.sum())

    def mean(self, layer: int) -> Tensor:
        """Return each channel's mean write gate [R]."""
        return self.sums[layer].sum(0) / self.positions

    def difference(self, layer: int, sums: Tensor, count: int | Tensor) -> Tensor:
        """Return d of each channel from Σ write over ``count`` positions; 0 of a constant gate."""
        deviation = self.deviations[layer]
        shift = sums / count - self.mean(layer)
        return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)


def token_gates(read: Activations, vocabulary: int) -> TokenGates:
    """Sum the write gates that were read by token."""
    sums: list[Tensor] = []
    deviations: list[Tensor] = []
    for gates in read.values.values():
        write = gates.double()
        own = torch.zeros(vocabulary, write.shape[1], dtype=torch.float64)
        sums.append(own.index_add_(0, read.tokens, write))
        deviations.append(write.std(0, correction=0))
    count = read.tokens.bincount(minlength=vocabulary)
    return TokenGates(count, tuple(sums), tuple(deviations))


@dataclass(frozen=True)
class ConceptToken:
    """A token that writes into a channel.

    Attributes:
        token_id, text: which.
        count: occurrences.
        gate: its mean write gate.
        ratio: that over the channel's mean write gate.
    """

    token_id: int
    text: str
    count: int
    gate: float
    ratio: float


@dataclass(frozen=True)
class Concept:
    """A channel with the words that write into it most.

    Attributes:
        layer, channel: which.
        tokens: single tokens that are whole words.
        difference: d of the channel over all occurrences of them.
    """

    layer: int
    channel: int
    tokens: tuple[ConceptToken, ...]
    difference: float

    @property
    def name(self) -> str:
        """The words."""
        return ", ".join(token.text.strip() for token in self.tokens)

    @property
    def words(self) -> tuple[str, ...]:
        """The words, without the space before them."""
        return tuple(token.text.strip() for token in self.tokens)


def concept_tokens(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    layer: int,
    channel: int,
    *,
    count: int = 10,
    least: int = 20,
) -> tuple[ConceptToken, ...]:
    """Return the tokens that write into a channel most beyond its mean, most first.

        ratio = mean write gate at the token / mean write gate

    Args:
        gates: summed over a corpus.
        tokenizer: of the model.
        layer, channel: which.
        count: how many tokens, at most.
        least: occurrences below which a token is left out.

    Raises:
        InputError: an unknown channel, or nothing wanted.
    """
    check_layer(len(gates.sums), layer)
    check_channel(gates.sums[layer].shape[1], layer, channel)
    if count < 1 or least < 1:
        raise InputError(f"{count} tokens that occur {least} times: expected at least 1 and 1.")
    kept = torch.ones(len(gates.count), dtype=torch.bool)
    texts = Vocabulary(tokenizer, len(tokenizer)).texts
    return _top(gates, texts, layer, channel, kept, count, least)


def propose_concepts(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 5,
    words: int = 5,
    least: int = 100,
    common: int = 100,
) -> tuple[Concept, ...]:
    """Return the channels whose most written words stand out most, with these words.

    A channel's words are the whole-word tokens of three letters or more that write into it most
    beyond its mean. Channels rank by d over all occurrences of their words. A word belongs to the
    first channel that has it: a later one that shares a word is left out.

    Args:
        gates: summed over a corpus.
        tokenizer: of the model.
        count: how many, at most.
        words: of each.
        least: occurrences below which a word is left out.
        common: the most frequent tokens, which are left out.

    Raises:
        InputError: fewer than ``words`` tokens are frequent enough, or nothing is wanted.
    """
    if min(count, words, least) < 1 or common < 0:
        raise InputError(
            f"{count} concepts of {words} words that occur {least} times, without the {common} "
            "most frequent: expected at least 1, 1, 1 and 0."
        )
    kept = torch.zeros(len(gates.count), dtype=torch.bool)
    known = whole_words(tokenizer)[: len(kept)]
    kept[: len(known)] = known
    kept[gates.count.argsort(descending=True, stable=True)[:common]] = False
    eligible = int((kept & (gates.count >= least)).sum())
    if eligible < words:
        raise InputError(
            f"{eligible} words occur {least} times or more in {gates.positions:,} tokens: expected "
            f"{words}. Read more text, or ask for rarer words."
        )
    texts = Vocabulary(tokenizer, len(tokenizer)).texts
    found: list[Concept] = []
    for layer, sums in enumerate(gates.sums):
        for channel in range(sums.shape[1]):
            tokens = _top(gates, texts, layer, channel, kept, words, least)
            places = [token.token_id for token in tokens]
            pooled = gates.difference(layer, sums[places].sum(0), gates.count[places].sum())
            found.append(Concept(layer, channel, tokens, float(pooled[channel])))
    found.sort(key=lambda c: (-c.difference, c.layer, c.channel))
    taken: set[int] = set()
    chosen: list[Concept] = []
    for concept in found:
        ids = {token.token_id for token in concept.tokens}
        if len(chosen) < count and not ids & taken:
            chosen.append(concept)
            taken |= ids
    return tuple(chosen)


def _top(
    gates: TokenGates,
    texts: list[str],
    layer: int,
    channel: int,
    kept: Tensor,
    count: int,
    least: int,
) -> tuple[ConceptToken, ...]:
    mean = float(gates.mean(layer)[channel])
    gate = gates.sums[layer][:, channel] / gates.count.clamp(min=1)
    # A token beyond the tokenizer's has no text, and none was read.
    wanted = kept & (gates.count >= least)
    order = torch.where(wanted, gate, -1.0).argsort(descending=True, stable=True)
    return tuple(
        ConceptToken(i, texts[i], int(gates.count[i]), float(gate[i]), float(gate[i]) / mean)
        for i in order[: min(count, int(wanted.sum()))].tolist()
    )
