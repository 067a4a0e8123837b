"""Channels of concepts, by what writes into a channel.

A channel stands for words where it is written at them more than elsewhere:

    d_k = (mean write gate at the words − mean write gate) / standard deviation of the write gate

over positions of a corpus; at a word of several tokens the last counts, where the word is known.

Source: ProtoT, §5.1 and A.3.1, where concepts are read off the sequences that write most, by eye.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError, check_whole
from prismlm.instruments.channels.case_files import Case, probe_of, words_of
from prismlm.instruments.channels.effects import (
    Channel,
    EffectTable,
    TableOptions,
    check_controls,
    effects_on,
)
from prismlm.instruments.channels.token_gates import (
    TokenGates,
    WordForms,
    token_gates,
    whole_words,
)
from prismlm.instruments.results import Row, Table, as_json
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.store import Corpus

# Among how many words of like frequency a stand-in is drawn.
NEIGHBOURS = 50


def find_channels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    words: Iterable[str] | Iterable[Case],
    sequences: Sequences,
    *,
    progress: Reporter = SILENT,
    **settings: int,
) -> Table:
    """Rank all channels by the standardised difference of their write gate at words.

    Args:
        model: with prototype mixers.
        tokenizer: its tokenizer.
        words: of the concept, or cases whose targets they are.
        sequences: the text that is read, batch by batch.
        progress: is shown the tokens read.
        settings: of :func:`rank_channels`.

    Raises:
        InputError: no prototype mixer, too few occurrences, or nothing to draw the control from.
    """
    listed = list(words)
    texts = words_of(w for w in listed if isinstance(w, Case))
    texts += tuple(w for w in listed if isinstance(w, str))
    forms = WordForms.of(tokenizer, texts)
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

    Args:
        gates: with sums at the words.
        tokenizer: of the model.
        forms: the words.
        least: occurrences of all words together below which nothing is said.
        kept: channels ranked.
        shuffles: of the control, for which words are drawn from whole-word tokens.
        seed: of the control.

    Returns:
        Rows of the best channels: ``layer`` and ``channel``; ``difference`` d; mean write gate
        ``at_words``, and over all, ``mean``. Facts: ``words`` with their occurrences; ``positions``
        read; ``difference`` of every channel, layer by layer; mean and deviation of d over all
        channels but the best, ``others_mean`` and ``others_deviation``, and of the best d when
        every word is replaced by a random word of like frequency, ``shuffled_mean`` and
        ``shuffled_deviation``; ``p``, the share of shuffles whose best d is at least as large, the
        unshuffled counted among them.

    Raises:
        InputError: as :func:`find_channels`.
    """
    counts = {word: gates.words[word].count for word in forms.forms}
    count = sum(counts.values())
    _check_counts(counts, gates.positions, least, kept, shuffles)
    layers = range(len(gates.sums))
    sums = [sum((gates.words[w].sums[i] for w in counts), torch.zeros(())) for i in layers]
    difference = tuple(gates.difference(i, sums[i], count) for i in layers)
    scores = _sorted_scores(gates, difference, [x / count for x in sums])
    others = torch.cat(difference).sort(descending=True).values[1:]
    null = _shuffled(gates, tokenizer, forms, [n for n in counts.values() if n], shuffles, seed)
    at_least = int((null >= scores[0]["difference"]).sum())
    return Table(
        "Channels that are written most at the words",
        {"layer": "", "channel": "", "difference": "+.2f", "at_words": ".3f", "mean": ".3f"},
        tuple(scores[:kept]),
        {
            "words": counts,
            "positions": gates.positions,
            "difference": [layer.tolist() for layer in difference],
            "others_mean": float(others.mean()),
            "others_deviation": float(others.std()),
            "shuffled_mean": float(null.mean()),
            "shuffled_deviation": float(null.std()),
            "p": (1 + at_least) / (1 + shuffles),
            "shuffles": shuffles,
        },
    )


def _sorted_scores(
    gates: TokenGates, difference: Sequence[Tensor], at_words: Sequence[Tensor]
) -> list[Row]:
    """Return a row for every channel, the largest difference first."""
    rows: list[Row] = [
        {
            "layer": i,
            "channel": k,
            "difference": d,
            "at_words": float(at_words[i][k]),
            "mean": float(gates.mean(i)[k]),
        }
        for i, layer in enumerate(difference)
        for k, d in enumerate(layer.tolist())
    ]
    return sorted(rows, key=lambda row: (-row["difference"], row["layer"], row["channel"]))


def _check_counts(
    counts: dict[str, int], positions: int, least: int, kept: int, shuffles: int
) -> None:
    check_whole("the number of channels kept", kept, 1)
    check_whole("the number of occurrences of words", least, 1)
    check_whole("the number of shuffles", shuffles, 1)
    if (count := sum(counts.values())) < least:
        raise InputError(
            f"{', '.join(counts)} occur {count} times in {positions:,} tokens: expected at "
            f"least {least}. Read more text, or give other words."
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


EMERGES = 0.05


@dataclass(frozen=True, eq=False)
class ConceptInModel:
    """What was found of a concept in one model.

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

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return as_json(
            {
                "model": self.name,
                "found": None if self.found is None else self.found.to_dict(),
                "emerges": self.emerges,
                "heldout_difference": self.heldout_difference,
                "heldout_count": self.heldout_count,
                "table": self.table.to_dict(),
            }
        )


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

    The channel is found in one split of a corpus and checked in the other. Done for several models
    this asks whether a channel for the concept emerges in each.

    Source: ProtoT, A.3.2.

    Args:
        model: with prototype mixers, in evaluation mode.
        tokenizer: its tokenizer.
        cases: contexts and targets.
        name: of the model.
        channels: (layer, channel) of each; none to find one.
        corpus: text to find it in: the training split, and for ``heldout_difference`` the other.
        max_tokens: of each split, or None for all.
        options: of the table.
        progress: is shown what is under way.

    Raises:
        InputError: neither channels nor a corpus, a corpus of another tokenizer, or as
            :func:`find_channels`, :func:`probe_of` and :func:`effects_on`.
    """
    if not channels and corpus is None:
        raise InputError("give channels, or a corpus to find one in.")
    by = options or TableOptions()
    probes = [probe_of(tokenizer, case, first_token=by.first_token) for case in cases]
    found, difference, count = None, None, 0
    if not channels and corpus is not None:
        # Said before a corpus is read, not after.
        check_controls(model, by)
        check_tokenizer_of(corpus, tokenizer, name)
        train = Sequences(corpus, "train", max_tokens=max_tokens)
        found = find_channels(model, tokenizer, cases, train, progress=progress)
        channels = ((found.rows[0]["layer"], found.rows[0]["channel"]),)
        heldout = Sequences(corpus, "heldout", max_tokens=max_tokens)
        gates = token_gates(model, heldout, WordForms.of(tokenizer, words_of(cases)))
        count = sum(word.count for word in gates.words.values())
        if count:
            layer, channel = channels[0]
            sums = sum((word.sums[layer] for word in gates.words.values()), torch.zeros(()))
            difference = float(gates.difference(layer, sums, count)[channel])
    table = effects_on(model, probes, channels, by, progress=progress)
    return ConceptInModel(name, found, difference, count, table)
