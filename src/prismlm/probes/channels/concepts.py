"""Channels of concepts, found by what writes into a channel.

A channel stands for words where it is written at them more than elsewhere:

    d_k = (mean write gate at the words − mean write gate) / standard deviation of the write gate

over positions of a corpus; of a word of several tokens the last counts.

Source: ProtoT, §5.1 and A.3.1, where concepts are read off the sequences that write most, by eye.
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
from prismlm.corpus.sequences import Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError, check_whole
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.case_files import Case, probe_of, words_of
from prismlm.probes.channels.effects import Channel, EffectTable, TableOptions, effects_on
from prismlm.probes.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.store import Corpus

NEIGHBOURS = 50
"""A control word is drawn among so many words of like frequency."""
EMERGES = 0.05
Forms = Mapping[str, tuple[tuple[int, ...], ...]]
"""The tokens of each form of a word."""


def word_forms(tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> Forms:
    """Return the tokens of words after a space, in their own spelling and capitalised.

    A form that two words share is the first one's, so it counts once; a word all of whose forms are
    others', as "Women" after "women", is left out.
    """
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    taken: set[tuple[int, ...]] = set()
    for word in dict.fromkeys(word.strip() for word in words):
        spellings = dict.fromkeys((word, word[:1].upper() + word[1:]))
        forms = [ids for spelling in spellings if (ids := _after_a_space(tokenizer, spelling))]
        if not word or not forms:
            raise InputError(f"{word!r} is no word: the tokenizer makes no token of it.")
        if own := tuple(form for form in dict.fromkeys(forms) if form not in taken):
            found[word] = own
            taken.update(own)
    return found


def _after_a_space(tokenizer: PreTrainedTokenizerBase, word: str) -> tuple[int, ...]:
    """Return the tokens of a word after a space, which some tokenizers add by themselves."""
    alone, after = (
        tuple(encode_text(tokenizer, text, start=False, end=False)) for text in (word, f" {word}")
    )
    return alone if alone and decode_token(tokenizer, alone[0])[:1] == " " else after


def word_ends(
    forms: Forms, continues: Bool[Tensor, " V"], read: Activations
) -> dict[str, Int64[Tensor, " n"]]:
    """Return where each word ends in a text, as numbers of its tokens; "girl" is not in "girls"."""
    ids, ends = read.tokens, read.lengths.cumsum(0)
    # Of each token, how many of its sequence stand before it.
    before = torch.arange(len(ids)) - (ends - read.lengths).repeat_interleave(read.lengths)
    following = torch.zeros(len(ids), dtype=torch.bool)
    following[:-1] = continues[ids[1:]] & (before[1:] > 0)
    found: dict[str, Tensor] = {}
    for word, own in forms.items():
        hits = torch.zeros(len(ids), dtype=torch.bool)
        for form in own:
            match = before >= len(form) - 1
            for back, token in enumerate(reversed(form)):
                match &= ids.roll(back) == token
            hits |= match
        found[word] = (hits & ~following).nonzero()[:, 0]
    return found


def continuing(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens continue a word: those whose text begins with a letter or a digit."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([text[:1].isalnum() for text in texts])


def whole_words(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens are a space and then letters alone, at least three."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([t[:1] == " " and len(t) > 3 and t[1:].isalpha() for t in texts])


def standardised(
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

    ``settings`` are of :func:`rank_channels`. Memory: 4 bytes for each token that is read and each
    channel of the model.
    """
    read = _write_gates(model, sequences, progress=progress)
    return rank_channels(read, tokenizer, words, **settings)


def _write_gates(
    model: PreTrainedModel,
    sequences: Sequences,
    layers: Iterable[int] | None = None,
    *,
    progress: Reporter = SILENT,
) -> Activations:
    reading = {"total": sequences.tokens, "progress": progress}
    return read_activations(model, sequences.batches(), ("write",), layers, **reading)


def rank_channels(
    read: Activations,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str],
    *,
    least: int = 20,
    kept: int = 10,
    shuffles: int = 999,
    seed: int = 0,
) -> Table:
    """Rank channels as :func:`find_channels`, from write gates that were read.

    ``least`` occurrences of all words together are expected; ``shuffles`` of the control draw words
    from whole-word tokens.

    Returns:
        Rows of the ``kept`` best channels: ``layer``, ``channel``, ``difference`` d, and the mean
        write gate ``at_words`` and over all, ``mean``. Facts: ``words`` with their occurrences;
        ``positions`` read; ``difference`` of every channel, by layer; mean and deviation of d over
        all channels but the best, ``others_…``, and of the best d when every word is replaced by a
        random word of like frequency, ``shuffled_…``; ``p``, the share of shuffles and the original
        whose best d is at least as large.
    """
    check_whole("the number of shuffles", shuffles, 1)
    forms = word_forms(tokenizer, words)
    counts, places = _occurrences(tokenizer, forms, read, least)
    ids, inverse, times = read.tokens.unique(return_inverse=True, return_counts=True)
    drawn = _drawn_words(tokenizer, forms, ids, times, list(counts.values()), shuffles, seed)
    null = torch.full((shuffles,), -torch.inf, dtype=torch.float64)
    differences: list[list[float]] = []
    rows: list[Row] = []
    for (_, layer), gates in read.values.items():
        write = gates.double()
        at_words = write[places].mean(0)
        differences.append(standardised(write, at_words).tolist())
        sums = torch.zeros(len(ids), write.shape[1], dtype=torch.float64)
        sums.index_add_(0, inverse, write)
        means = sums[drawn].sum(1) / times[drawn].sum(1, keepdim=True)
        null = torch.maximum(null, standardised(write, means).amax(1))
        columns = differences[-1], at_words.tolist(), write.mean(0).tolist()
        for channel, row in enumerate(zip(*columns, strict=True)):
            figures = dict(zip(("difference", "at_words", "mean"), row, strict=True))
            rows.append({"layer": layer, "channel": channel} | figures)
    rows.sort(key=lambda row: -row["difference"])
    first, *others = (row["difference"] for row in rows)
    facts = {
        "words": counts,
        "positions": len(read.tokens),
        "difference": differences,
        "others_mean": float(np.mean(others)),
        "others_deviation": float(np.std(others, ddof=1)),
        "shuffled_mean": float(null.mean()),
        "shuffled_deviation": float(null.std()),
        "p": (1 + int((null >= first).sum())) / (1 + shuffles),
        "shuffles": shuffles,
    }
    columns = {"layer": "", "channel": "", "difference": "+.2f", "at_words": ".3f", "mean": ".3f"}
    return Table("Channels that are written most at the words", columns, tuple(rows[:kept]), facts)


def _occurrences(
    tokenizer: PreTrainedTokenizerBase, forms: Forms, read: Activations, least: int = 0
) -> tuple[dict[str, int], Int64[Tensor, " n"]]:
    """Return how often each word occurs, and where they end; InputError below ``least``."""
    ends = word_ends(forms, continuing(tokenizer), read)
    counts = {word: len(own) for word, own in ends.items()}
    places = torch.cat(list(ends.values()))
    if len(places) < least:
        raise InputError(
            f"{', '.join(counts)} occur {len(places)} times in {len(read.tokens):,} tokens: "
            f"expected at least {least}. Read more text, or give other words."
        )
    return counts, places


def _drawn_words(
    tokenizer: PreTrainedTokenizerBase,
    forms: Forms,
    ids: Int64[Tensor, " U"],
    times: Int64[Tensor, " U"],
    counts: Sequence[int],
    shuffles: int,
    seed: int,
) -> Int64[Tensor, "shuffles words"]:
    """Return sets of random words of like frequency with each of the words, as places in ids."""
    own = torch.tensor([token for of_word in forms.values() for form in of_word for token in form])
    known = whole_words(tokenizer).nonzero()[:, 0]
    free = (torch.isin(ids, known) & ~torch.isin(ids, own)).nonzero()[:, 0]
    wanted = [count for count in counts if count]
    if len(free) < 2 * len(wanted):
        raise InputError(
            f"{len(free)} other words were read: too few to draw a control from for {len(wanted)} "
            "words. Read more text."
        )
    frequency = times[free].double().log()
    apart = (frequency - torch.tensor(wanted).double().log()[:, None]).abs()
    pools = free[apart.argsort(dim=1, stable=True)[:, :NEIGHBOURS]].numpy()
    generator = np.random.default_rng(seed)
    return torch.from_numpy(np.stack([generator.choice(pool, shuffles) for pool in pools], axis=1))


@dataclass(frozen=True, eq=False)
class ConceptInModel:
    """A concept in one model.

    Attributes:
        name: of the model.
        found: the channels ranked, or None where the channel was given.
        heldout_difference: d of the best channel in the held-out split; None where it was not
            looked for, or no word of the concept is there.
        heldout_count: occurrences of the words there.
        table: the interventions on the best channel, or on those given.
    """

    name: str
    found: Table | None
    heldout_difference: float | None
    heldout_count: int
    table: EffectTable

    @property
    def emerges(self) -> bool | None:
        """Whether the best channel stands out beyond random words of like frequency, p < 0.05."""
        return None if self.found is None else self.found["p"] < EMERGES

    def to_dict(self) -> Row:
        """Return everything, for JSON."""
        value = {"model": self.name, "found": self.found and self.found.to_dict()}
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
    """Intervene on the channels given, or on the one that writes most at the cases' targets.

    The channel is found in the training split of a corpus, of which at most ``max_tokens`` are
    read, and checked in the held-out one. Done for several models this asks whether a channel for
    the concept emerges in each. Source: ProtoT, A.3.2.
    """
    by = options or TableOptions()
    probes = [probe_of(tokenizer, case, first_token=by.first_token) for case in cases]
    found, difference, count = None, None, 0
    if not channels:
        if corpus is None:
            raise InputError("give channels, or a corpus to find one in.")
        check_tokenizer_of(corpus, tokenizer, name)
        words = words_of(cases)
        train = Sequences(corpus, "train", max_tokens=max_tokens)
        found = find_channels(model, tokenizer, words, train, progress=progress)
        layer, channel = found.rows[0]["layer"], found.rows[0]["channel"]
        channels = ((layer, channel),)
        heldout = Sequences(corpus, "heldout", max_tokens=max_tokens)
        read = _write_gates(model, heldout, (layer,))
        _, places = _occurrences(tokenizer, word_forms(tokenizer, words), read)
        count, write = len(places), read.values["write", layer].double()
        if count:
            difference = float(standardised(write, write[places].mean(0))[channel])
    table = effects_on(model, probes, channels, by, progress=progress)
    return ConceptInModel(name, found, difference, count, table)
