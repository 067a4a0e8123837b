"""Channels that are written at the words of a concept.

    d_k = (mean write gate at the words − mean write gate) / standard deviation of the write gate

over positions of a corpus; a word of several tokens counts at its last. Source: ProtoT, §5.1 and
A.3.1, where concepts are read off the sequences that write most, by eye.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from prismlm.corpus.encode import encode_text
from prismlm.corpus.pieces import decode_token
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError, check_whole
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.effects import (
    Case,
    Channel,
    EffectTable,
    TableOptions,
    effects_on,
    probe_of,
    words_of,
)
from prismlm.probes.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.store import Corpus

NEIGHBOURS = 50
"""A control word is drawn from this many words of the most similar frequency."""
EMERGES = 0.05
Forms = Mapping[str, tuple[tuple[int, ...], ...]]
"""The tokens of each form of a word."""


def word_forms(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> Forms:
    """Return the tokens of words after a space, as written and capitalised.

    A form of two words counts for the first; a word without forms of its own, such as "Women" after
    "women", is left out.
    """
    forms: dict[str, tuple[tuple[int, ...], ...]] = {}
    used: set[tuple[int, ...]] = set()
    for word in dict.fromkeys(word.strip() for word in words):
        spellings = dict.fromkeys((word, word[:1].upper() + word[1:]))
        tokens = [ids for spelling in spellings if (ids := _after_a_space(tokenizer, spelling))]
        if not word or not tokens:
            raise InputError(f"{word!r} is not a word: the tokenizer makes no token of it.")
        if new := tuple(form for form in dict.fromkeys(tokens) if form not in used):
            forms[word] = new
            used.update(new)
    return forms


def _after_a_space(tokenizer: PreTrainedTokenizerBase, word: str) -> tuple[int, ...]:
    """Return the tokens of a word after a space, which some tokenizers add themselves."""
    alone, after = (
        tuple(encode_text(tokenizer, text, start=False, end=False)) for text in (word, f" {word}")
    )
    return alone if alone and decode_token(tokenizer, alone[0])[:1] == " " else after


def word_ends(
    tokenizer: PreTrainedTokenizerBase, forms: Forms, activations: Activations
) -> dict[str, Int64[Tensor, " n"]]:
    """Return the tokens at which each word ends in a text; "girl" is not in "girls"."""
    ids, lengths, continues = activations.tokens, activations.lengths, continues_word(tokenizer)
    # How many tokens of its sequence stand before each token.
    before = torch.arange(len(ids)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    continued = torch.zeros(len(ids), dtype=torch.bool)
    continued[:-1] = continues[ids[1:]] & (before[1:] > 0)
    ends: dict[str, Tensor] = {}
    for word, word_tokens in forms.items():
        hits = torch.zeros(len(ids), dtype=torch.bool)
        for form in word_tokens:
            match = before >= len(form) - 1
            for back, token in enumerate(reversed(form)):
                match &= ids.roll(back) == token
            hits |= match
        ends[word] = (hits & ~continued).nonzero()[:, 0]
    return ends


def continues_word(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens continue a word: those whose text begins with a letter or a digit."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([text[:1].isalnum() for text in texts])


def whole_words(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens are a space and then only letters, at least three."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([t[:1] == " " and len(t) > 3 and t[1:].isalpha() for t in texts])


def standardised_difference(
    write: Float64[Tensor, "N R"], means: Float64[Tensor, "... R"]
) -> Float64[Tensor, "... R"]:
    """Return d of each channel from mean write gates at some positions; 0 of a constant gate."""
    deviation = write.std(0, correction=0)
    shift = means - write.mean(0)
    return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)


def find_channels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str],
    sequences: Sequences,
    *,
    progress: Reporter = SILENT,
    **settings: int,
) -> Table:
    """Rank all channels by the standardised difference of their write gate at a concept's words.

    ``settings`` are those of :func:`rank_channels`. Memory: 4 bytes for each token that is read and
    each channel of the model.
    """
    reading = {"total": sequences.tokens, "progress": progress}
    activations = read_activations(model, sequences.batches(), ("write",), **reading)
    return rank_channels(activations, tokenizer, words, **settings)


def rank_channels(
    activations: Activations,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str],
    *,
    min_occurrences: int = 20,
    count: int = 10,
    shuffles: int = 999,
    seed: int = 0,
) -> Table:
    """Rank channels as :func:`find_channels`, from write gates.

    At least ``min_occurrences`` of all words together are required; each of the ``shuffles`` of the
    control replaces every word by a random whole-word token of like frequency.

    There are rows of the ``count`` best channels, with ``difference`` d and mean write gates. Facts
    are ``words`` with their occurrences; ``difference`` of every channel, by layer; mean and
    deviation of d over all ``others`` than the best, and of the best d of each shuffle; and ``p``,
    the share of shuffles and the original whose best d is at least as large.
    """
    check_whole("the number of shuffles", shuffles, 1)
    forms = word_forms(tokenizer, words)
    occurrences, positions = _occurrences(tokenizer, forms, activations, min_occurrences)
    ids, inverse, times = activations.tokens.unique(return_inverse=True, return_counts=True)
    counts = [n for n in occurrences.values() if n]
    random = _random_words(tokenizer, forms, ids, times, counts, shuffles, seed)
    null = torch.full((shuffles,), -torch.inf, dtype=torch.float64)
    differences: list[list[float]] = []
    rows: list[Row] = []
    for (_, layer), gates in activations.values.items():
        write = gates.double()
        at_words = write[positions].mean(0)
        differences.append(standardised_difference(write, at_words).tolist())
        sums = torch.zeros(len(ids), write.shape[1], dtype=torch.float64)
        sums.index_add_(0, inverse, write)
        means = sums[random].sum(1) / times[random].sum(1, keepdim=True)
        null = torch.maximum(null, standardised_difference(write, means).amax(1))
        columns = zip(differences[-1], at_words.tolist(), write.mean(0).tolist(), strict=True)
        rows += [
            {"layer": layer, "channel": channel, "difference": d, "at_words": at, "mean": mean}
            for channel, (d, at, mean) in enumerate(columns)
        ]
    rows.sort(key=lambda row: -row["difference"])
    best, *others = (row["difference"] for row in rows)
    facts = {
        "words": occurrences,
        "positions": len(activations.tokens),
        "difference": differences,
        "others_mean": float(np.mean(others)),
        "others_deviation": float(np.std(others, ddof=1)),
        "shuffled_mean": float(null.mean()),
        "shuffled_deviation": float(null.std()),
        "p": (1 + int((null >= best).sum())) / (1 + shuffles),
        "shuffles": shuffles,
    }
    columns = {"layer": "", "channel": "", "difference": "+.2f", "at_words": ".3f", "mean": ".3f"}
    title = "Channels that are written at the words more than elsewhere"
    return Table(title, columns, tuple(rows[:count]), facts)


def _occurrences(
    tokenizer: PreTrainedTokenizerBase, forms: Forms, activations: Activations, minimum: int
) -> tuple[dict[str, int], Tensor]:
    """Return how often each word occurs, and the positions of all; InputError if too few."""
    ends = word_ends(tokenizer, forms, activations)
    positions = torch.cat(list(ends.values()))
    if len(positions) < minimum:
        raise InputError(
            f"{', '.join(ends)} occur {len(positions)} times in {len(activations.tokens):,} "
            f"tokens: expected at least {minimum}. Read more text, or choose other words."
        )
    return {word: len(tokens) for word, tokens in ends.items()}, positions


def _random_words(
    tokenizer: PreTrainedTokenizerBase,
    forms: Forms,
    ids: Int64[Tensor, " U"],
    times: Int64[Tensor, " U"],
    counts: Sequence[int],
    shuffles: int,
    seed: int,
) -> Int64[Tensor, "shuffles words"]:
    """Return random words with frequencies similar to ``counts``, as indices of ``ids``."""
    excluded = torch.tensor([token for word in forms.values() for form in word for token in form])
    candidates = whole_words(tokenizer).nonzero()[:, 0]
    free = (torch.isin(ids, candidates) & ~torch.isin(ids, excluded)).nonzero()[:, 0]
    if len(free) < 2 * len(counts):
        raise InputError(
            f"the text has {len(free)} other words, too few for a control of {len(counts)} words: "
            "read more text."
        )
    frequency = times[free].double().log()
    distance = (frequency - torch.tensor(counts).double().log()[:, None]).abs()
    pools = free[distance.argsort(dim=1, stable=True)[:, :NEIGHBOURS]].numpy()
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([generator.choice(pool, shuffles) for pool in pools], axis=1))


@dataclass(frozen=True, eq=False)
class ConceptInModel:
    """A concept in one model; without ``ranking`` and ``heldout_difference`` for named channels."""

    name: str
    ranking: Table | None  # of all channels, by d
    heldout_difference: float | None  # d of the best channel in the held-out split
    heldout_count: int  # occurrences of the words there
    table: EffectTable  # the interventions on the best channel, or on the named ones

    @property
    def emerges(self) -> bool | None:
        """Whether d of the best channel beats random words of like frequency, p < 0.05."""
        return None if self.ranking is None else self.ranking["p"] < EMERGES

    def to_dict(self) -> Row:
        """Return everything, for JSON."""
        value = {"model": self.name, "found": self.ranking and self.ranking.to_dict()}
        value |= {"emerges": self.emerges, "heldout_difference": self.heldout_difference}
        value |= {"heldout_count": self.heldout_count, "table": self.table.to_dict()}
        return as_json(value)


def concept_in_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    *,
    name: str = "",
    channels: Sequence[Channel] = (),
    corpus: Corpus | None = None,
    max_tokens: int | None = None,
    options: TableOptions | None = None,
    progress: Reporter = SILENT,
) -> ConceptInModel:
    """Intervene on the named channels, or on the one that is written most at the cases' targets.

    That channel is found in the training split of a corpus, in at most ``max_tokens`` tokens, and
    checked in the held-out one. Over several models this asks whether a channel for the concept
    emerges in each. Source: ProtoT, A.3.2.
    """
    options = options or TableOptions()
    probes = [probe_of(tokenizer, case, first_token=options.first_token) for case in cases]
    ranking, difference, count = None, None, 0
    if not channels:
        if corpus is None:
            raise InputError("name channels, or a corpus to find one in.")
        check_tokenizer_of(corpus, tokenizer, name)
        words = words_of(cases)
        train = Sequences(corpus, "train", max_tokens=max_tokens)
        ranking = find_channels(model, tokenizer, words, train, progress=progress)
        layer, channel = ranking.rows[0]["layer"], ranking.rows[0]["channel"]
        channels = ((layer, channel),)
        heldout = Sequences(corpus, "heldout", max_tokens=max_tokens)
        activations = read_activations(model, heldout.batches(), ("write",), (layer,))
        ends = word_ends(tokenizer, word_forms(tokenizer, words), activations)
        positions = torch.cat(list(ends.values()))
        count, write = len(positions), activations.values["write", layer].double()
        if count:
            difference = float(standardised_difference(write, write[positions].mean(0))[channel])
    table = effects_on(model, probes, channels, options, progress=progress)
    return ConceptInModel(name, ranking, difference, count, table)
