"""One concept in one model: the channel that stands for it, and what the model does without it.

The channel is found in one split of a corpus and checked in the other. Done for several models this
asks whether a channel for the concept emerges in each.

Source: ProtoT, A.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prismlm.corpus.sequences import Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError
from prismlm.instruments.channels.case_files import Case, probe_of, words_of
from prismlm.instruments.channels.concepts import RankedChannels, find_channels
from prismlm.instruments.channels.effect_table import Channel, EffectTable
from prismlm.instruments.channels.effects import INTERVENTIONS, ControlFrom, check_table, effects_on
from prismlm.instruments.channels.token_gates import token_gates
from prismlm.instruments.channels.word_forms import WordForms
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.store import Corpus

EMERGES = 0.05


@dataclass(frozen=True)
class TableOptions:
    """How a table is measured, as :func:`intervention_table` says."""

    controls: int = 5
    control_from: ControlFrom = "layer"
    interventions: tuple[str, ...] = INTERVENTIONS
    reinitialisations: int = 3
    minimum_probability: float = 0.01
    first_token: bool = False
    seed: int = 0


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
    found: RankedChannels | None
    heldout_difference: float | None
    heldout_count: int
    table: EffectTable

    @property
    def emerges(self) -> bool | None:
        """Whether the best channel stands out beyond random words of like frequency, p < 0.05."""
        return None if self.found is None else self.found.p < EMERGES

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "model": self.name,
            "found": None if self.found is None else ranked_to_dict(self.found),
            "emerges": self.emerges,
            "heldout_difference": self.heldout_difference,
            "heldout_count": self.heldout_count,
            "table": self.table.to_dict(),
        }


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
            :func:`find_channels` and :func:`intervention_table`.
    """
    if not channels and corpus is None:
        raise InputError("give channels, or a corpus to find one in.")
    settings = dict(vars(options or TableOptions()))
    first_token = settings.pop("first_token")
    probes = [probe_of(tokenizer, case, first_token=first_token) for case in cases]
    found, difference, count = None, None, 0
    if not channels and corpus is not None:
        # Said before a corpus is read, not after.
        check_table(model, **settings)
        check_tokenizer_of(corpus, tokenizer, name)
        train = Sequences(corpus, "train", max_tokens=max_tokens)
        found = find_channels(model, tokenizer, cases, train, progress=progress)
        channels = ((found.best.layer, found.best.channel),)
        difference, count = _in_heldout(
            model,
            tokenizer,
            cases,
            Sequences(corpus, "heldout", max_tokens=max_tokens),
            channels[0],
        )
    table = effects_on(model, probes, channels, **settings, progress=progress)
    return ConceptInModel(name, found, difference, count, table)


def ranked_to_dict(found: RankedChannels) -> dict[str, Any]:
    """Return what was found, with d of every channel, for JSON."""
    return {
        "words": found.words,
        "positions": found.positions,
        "ranked": [asdict(score) for score in found.ranked],
        "difference": [layer.tolist() for layer in found.difference],
        "others_mean": found.others_mean,
        "others_deviation": found.others_deviation,
        "shuffled_mean": found.shuffled_mean,
        "shuffled_deviation": found.shuffled_deviation,
        "shuffles": found.shuffles,
        "p": found.p,
    }


def _in_heldout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cases: Sequence[Case],
    sequences: Sequences,
    place: Channel,
) -> tuple[float | None, int]:
    """Return d of one channel, with the occurrences that it is from."""
    layer, channel = place
    gates = token_gates(model, sequences, WordForms.of(tokenizer, words_of(cases)))
    count = sum(word.count for word in gates.words.values())
    if not count:
        return None, 0
    sums = sum(word.sums[layer] for word in gates.words.values())
    return float(gates.difference(layer, sums, count)[channel]), count  # pyright: ignore
