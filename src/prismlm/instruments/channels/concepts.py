"""Channels of concepts, and concepts of channels, by what writes into a channel.

A channel stands for words where it is written at them more than elsewhere:

    d_k = (mean write gate at the words − mean write gate) / standard deviation of the write gate

over positions of a corpus; at a word of several tokens the last counts, where the word is known.

Source: ProtoT, §5.1 and A.3.1, where concepts are read off the sequences that write most, by eye.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError
from prismlm.instruments.channels.case_files import Case, words_of
from prismlm.instruments.channels.token_gates import TokenGates, token_gates
from prismlm.instruments.channels.word_forms import WordForms, token_texts, whole_words
from prismlm.models.decoders.mixers import check_channel, check_layer
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Among how many words of like frequency a stand-in is drawn.
NEIGHBOURS = 50


@dataclass(frozen=True)
class ChannelScore:
    """How much one channel is written at a concept's words.

    Attributes:
        layer, channel: which.
        difference: d, in standard deviations of its gate.
        at_words: mean write gate at the words.
        mean: mean write gate.
    """

    layer: int
    channel: int
    difference: float
    at_words: float
    mean: float


@dataclass(frozen=True, eq=False)
class RankedChannels:
    """Channels ranked for a concept.

    Attributes:
        words: with their occurrences.
        positions: of the corpus that was read.
        difference: d of every channel, layer by layer.
        ranked: the first of them, best first.
        others_mean, others_deviation: of d over all channels but the best.
        shuffled_mean, shuffled_deviation: of the best d when every word is replaced by a random
            word of like frequency.
        p: share of shuffles whose best d is at least as large, the unshuffled counted among them.
        shuffles: how many.
    """

    words: dict[str, int]
    positions: int
    difference: tuple[Float64[Tensor, " R"], ...]
    ranked: tuple[ChannelScore, ...]
    others_mean: float
    others_deviation: float
    shuffled_mean: float
    shuffled_deviation: float
    p: float
    shuffles: int

    @property
    def best(self) -> ChannelScore:
        """The channel with the largest d."""
        return self.ranked[0]


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


def find_channels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str] | Iterable[Case],
    sequences: Sequences,
    *,
    least: int = 20,
    kept: int = 10,
    shuffles: int = 999,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> RankedChannels:
    """Rank all channels by the standardised difference of their write gate at words.

    Args:
        model: with prototype mixers.
        tokenizer: its tokenizer.
        words: of the concept, or cases whose targets they are.
        sequences: the text that is read, batch by batch.
        least: occurrences of all words together below which nothing is said.
        kept: channels ranked.
        shuffles: of the control, for which words are drawn from whole-word tokens.
        seed: of the control.
        progress: is shown the tokens read.

    Raises:
        InputError: no prototype mixer, too few occurrences, or nothing to draw the control from.
    """
    listed = list(words)
    texts = words_of(w for w in listed if isinstance(w, Case))
    texts += tuple(w for w in listed if isinstance(w, str))
    forms = WordForms.of(tokenizer, texts)
    gates = token_gates(model, sequences, forms, progress=progress)
    return rank_channels(
        gates, tokenizer, forms, least=least, kept=kept, shuffles=shuffles, seed=seed
    )


def rank_channels(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    forms: WordForms,
    *,
    least: int = 20,
    kept: int = 10,
    shuffles: int = 999,
    seed: int = 0,
) -> RankedChannels:
    """Rank channels as :func:`find_channels`, from gates that were summed with these words.

    Raises:
        InputError: as :func:`find_channels`.
    """
    counts = {word: gates.words[word].count for word in forms.forms}
    count = sum(counts.values())
    if min(least, kept, shuffles) < 1:
        raise InputError(
            f"{kept} channels of words that occur {least} times, with {shuffles} shuffles: "
            "expected at least 1 each."
        )
    if count < least:
        raise InputError(
            f"{', '.join(counts)} occur {count} times in {gates.positions:,} tokens: expected at "
            f"least {least}. Read more text, or give other words."
        )
    layers = range(len(gates.sums))
    sums = [sum((gates.words[w].sums[i] for w in counts), torch.zeros(())) for i in layers]
    difference = tuple(gates.difference(i, sums[i], count) for i in layers)
    scores = sorted(
        (
            ChannelScore(i, k, d, float(sums[i][k]) / count, float(gates.mean(i)[k]))
            for i in layers
            for k, d in enumerate(difference[i].tolist())
        ),
        key=lambda score: (-score.difference, score.layer, score.channel),
    )
    others = torch.cat(difference).sort(descending=True).values[1:]
    null = _shuffled(gates, tokenizer, forms, [n for n in counts.values() if n], shuffles, seed)
    at_least = int((null >= scores[0].difference).sum())
    return RankedChannels(
        counts,
        gates.positions,
        difference,
        tuple(scores[:kept]),
        float(others.mean()),
        float(others.std()),
        float(null.mean()),
        float(null.std()),
        (1 + at_least) / (1 + shuffles),
        shuffles,
    )


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
    return _top(gates, token_texts(tokenizer), layer, channel, kept, count, least)


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
    texts = token_texts(tokenizer)
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


def _shuffled(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    forms: WordForms,
    counts: list[int],
    shuffles: int,
    seed: int,
) -> Tensor:
    """Return the best d of sets of random words, each of like frequency with one of the words."""
    known = whole_words(tokenizer)[: len(gates.count)]
    free = [
        i for i in known.nonzero()[:, 0].tolist() if gates.count[i] > 0 and i not in forms.tokens
    ]
    if len(free) < 2 * len(counts):
        raise InputError(
            f"{len(free)} other words were read: too few to draw a control from for {len(counts)} "
            "words. Read more text."
        )
    frequency = gates.count[free].double().log()
    pools = [
        np.array(free)[(frequency - np.log(n)).abs().argsort(stable=True)[:NEIGHBOURS].numpy()]
        for n in counts
    ]
    generator = np.random.default_rng(seed)
    drawn = torch.from_numpy(np.stack([generator.choice(pool, shuffles) for pool in pools], axis=1))
    count = gates.count[drawn].sum(1, keepdim=True)
    best = [
        gates.difference(i, sums[drawn].sum(1), count).amax(1) for i, sums in enumerate(gates.sums)
    ]
    return torch.stack(best).amax(0)
