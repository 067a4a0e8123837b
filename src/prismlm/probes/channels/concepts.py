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
from prismlm.errors import InputError, check_finite, check_whole
from prismlm.models.decoders.mixers import gates_of, mixers_of
from prismlm.models.evaluating import evaluating
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


@dataclass(frozen=True, eq=False)
class WordForms:
    """The tokens of words after a space, in their own spelling and capitalised.

    Attributes:
        forms: of each word, token sequences of any length.
        continues: which tokens continue a word.
    """

    forms: Mapping[str, tuple[tuple[int, ...], ...]]
    continues: Bool[Tensor, " V"]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, words: Iterable[str]) -> WordForms:
        """Look up words; a form that two of them share is the first one's, so it counts once.

        A word all of whose forms are others', as "Women" after "women", is left out.
        """
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        taken: set[tuple[int, ...]] = set()
        for word in words:
            bare = word.strip()
            spellings = dict.fromkeys((bare, bare[:1].upper() + bare[1:]))
            encoded = [_after_a_space(tokenizer, spelling) for spelling in spellings]
            forms = tuple(dict.fromkeys(ids for ids in encoded if ids))
            if not bare or not forms:
                raise InputError(f"{word!r} is no word: the tokenizer makes no token of it.")
            if own := tuple(form for form in forms if form not in taken):
                found[bare] = own
                taken.update(own)
        return cls(found, continuing(tokenizer))

    def ends(self, ids: Int64[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> dict[str, Tensor]:
        """Return where each word ends, bool [B, T]; "girl" is not in "girls"."""
        following = torch.zeros_like(mask)
        following[:, :-1] = self.continues[ids[:, 1:]] & mask[:, 1:]
        ends = {word: torch.zeros_like(mask) for word in self.forms}
        for word, forms in self.forms.items():
            for form in forms:
                last = len(form) - 1
                match = mask[:, last:].clone()
                for offset, token in enumerate(form):
                    match &= ids[:, offset : offset + match.shape[1]] == token
                ends[word][:, last:] |= match
            ends[word] &= ~following
        return ends


def _after_a_space(tokenizer: PreTrainedTokenizerBase, word: str) -> tuple[int, ...]:
    """Return the tokens of a word after a space, which some tokenizers add by themselves."""
    alone, after = (
        tuple(encode_text(tokenizer, text, start=False, end=False)) for text in (word, f" {word}")
    )
    return alone if alone and decode_token(tokenizer, alone[0])[:1] == " " else after


def continuing(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens continue a word: those whose text begins with a letter or a digit."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([text[:1].isalnum() for text in texts])


def whole_words(tokenizer: PreTrainedTokenizerBase) -> Bool[Tensor, " V"]:
    """Return which tokens are a space and then letters alone, at least three."""
    texts = (decode_token(tokenizer, token) for token in range(len(tokenizer)))
    return torch.tensor([t[:1] == " " and len(t) > 3 and t[1:].isalpha() for t in texts])


@dataclass(eq=False)
class WordSums:
    """Of one word: its occurrences, and Σ write at their last tokens, of each layer."""

    count: int
    sums: tuple[Float64[Tensor, " R"], ...]


@dataclass(frozen=True, eq=False)
class TokenGates:
    """Write gates by token.

    Attributes:
        count: how often each token was read.
        sums: Σ write over the positions of each token, of each layer.
        squares: Σ write² over all positions, of each layer.
        words: those that were looked for.
    """

    count: Int64[Tensor, " V"]
    sums: tuple[Float64[Tensor, "V R"], ...]
    squares: tuple[Float64[Tensor, " R"], ...]
    words: dict[str, WordSums]

    @property
    def positions(self) -> int:
        """How many tokens were read."""
        return int(self.count.sum())

    def mean(self, layer: int) -> Float64[Tensor, " R"]:
        """Return each channel's mean write gate."""
        return self.sums[layer].sum(0) / self.positions

    def deviation(self, layer: int) -> Float64[Tensor, " R"]:
        """Return the standard deviation of each channel's write gate over positions."""
        variance = self.squares[layer] / self.positions - self.mean(layer).square()
        return variance.clamp(min=0).sqrt()

    def difference(
        self, layer: int, sums: Float64[Tensor, "... R"], count: int | Tensor
    ) -> Float64[Tensor, "... R"]:
        """Return d of each channel from Σ write over ``count`` positions; 0 of a constant gate."""
        deviation = self.deviation(layer)
        shift = sums / count - self.mean(layer)
        return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)

    def at_words(self, layer: int) -> tuple[Float64[Tensor, " R"], int]:
        """Return Σ write over the occurrences of all words, and their number."""
        sums = sum((word.sums[layer] for word in self.words.values()), torch.zeros(()))
        return sums, sum(word.count for word in self.words.values())


def token_gates(
    model: PreTrainedModel,
    sequences: Sequences,
    words: WordForms | None = None,
    *,
    progress: Reporter = SILENT,
) -> TokenGates:
    """Sum write gates over a corpus; memory is 8·V·R bytes a layer, whatever its size."""
    channels = [mixer.channels for mixer in mixers_of(model)]
    size: int = model.config.vocab_size

    def zeros(*shape: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(*shape, r, dtype=torch.float64) for r in channels)

    by_word = {word: WordSums(0, zeros()) for word in (() if words is None else words.forms)}
    total = TokenGates(torch.zeros(size, dtype=torch.int64), zeros(size), zeros(), by_word)
    with progress.task("Reading write gates", sequences.tokens) as task, evaluating(model):
        for batch in sequences.batches():
            gates = gates_of(model, batch.input_ids, batch.attention_mask)
            tokens = batch.input_ids[batch.owned]
            total.count.index_add_(0, tokens, torch.ones_like(tokens))
            ends = {} if words is None else words.ends(batch.input_ids, batch.attention_mask)
            here = {word: hits[batch.owned] for word, hits in ends.items()}
            for word, hits in here.items():
                by_word[word].count += int(hits.sum())
            for layer, evidence in enumerate(gates):
                write = evidence.write.cpu()[batch.owned].double()
                check_finite("gates", write)
                total.sums[layer].index_add_(0, tokens, write)
                total.squares[layer].add_(write.square().sum(0))
                for word, hits in here.items():
                    by_word[word].sums[layer].add_(write[hits].sum(0))
            task.advance(len(tokens))
    return total


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

    ``settings`` are of :func:`rank_channels`.
    """
    forms = WordForms.of(tokenizer, dict.fromkeys(word.strip() for word in words))
    gates = token_gates(model, sequences, forms, progress=progress)
    return rank_channels(gates, tokenizer, forms, **settings)


def rank_channels(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    forms: WordForms,
    *,
    least: int = 20,
    kept: int = 10,
    shuffles: int = 999,
    seed: int = 0,
) -> Table:
    """Rank channels as :func:`find_channels`, from gates that were summed with these words.

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
    counts = {word: gates.words[word].count for word in forms.forms}
    if (count := sum(counts.values())) < least:
        raise InputError(
            f"{', '.join(counts)} occur {count} times in {gates.positions:,} tokens: expected at "
            f"least {least}. Read more text, or give other words."
        )
    differences: list[list[float]] = []
    rows: list[Row] = []
    for layer in range(len(gates.sums)):
        own = gates.at_words(layer)[0]
        differences.append(gates.difference(layer, own, count).tolist())
        columns = differences[-1], (own / count).tolist(), gates.mean(layer).tolist()
        for channel, (d, at_words, mean) in enumerate(zip(*columns, strict=True)):
            rows.append({"layer": layer, "channel": channel, "difference": d,
                         "at_words": at_words, "mean": mean})  # fmt: skip
    rows.sort(key=lambda row: -row["difference"])
    others = np.array([row["difference"] for row in rows[1:]])
    null = _shuffled(gates, tokenizer, forms, [n for n in counts.values() if n], shuffles, seed)
    facts = {
        "words": counts,
        "positions": gates.positions,
        "difference": differences,
        "others_mean": float(others.mean()),
        "others_deviation": float(others.std(ddof=1)),
        "shuffled_mean": float(null.mean()),
        "shuffled_deviation": float(null.std()),
        "p": (1 + int((null >= rows[0]["difference"]).sum())) / (1 + shuffles),
        "shuffles": shuffles,
    }
    columns = {"layer": "", "channel": "", "difference": "+.2f", "at_words": ".3f", "mean": ".3f"}
    return Table("Channels that are written most at the words", columns, tuple(rows[:kept]), facts)


def _shuffled(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    forms: WordForms,
    counts: list[int],
    shuffles: int,
    seed: int,
) -> Tensor:
    """Return the best d of sets of random words, each of like frequency with one of the words."""
    own = {token for forms_of in forms.forms.values() for form in forms_of for token in form}
    known = whole_words(tokenizer)[: len(gates.count)].nonzero()[:, 0].tolist()
    free = [token for token in known if gates.count[token] > 0 and token not in own]
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
        gates = token_gates(model, heldout, WordForms.of(tokenizer, words))
        sums, count = gates.at_words(layer)
        if count:
            difference = float(gates.difference(layer, sums, count)[channel])
    table = effects_on(model, probes, channels, by, progress=progress)
    return ConceptInModel(name, found, difference, count, table)
