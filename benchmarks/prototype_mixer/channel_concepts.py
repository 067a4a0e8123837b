"""Concepts that channels are proposed for, put to the test in held-out text; for channels.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prototype_mixer.heldout_cases import heldout_cases
from benchmarks.prototype_mixer.proposed_concepts import Concept, TokenGates, propose_concepts
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.models.decoders.protot import half_lives
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.concepts import EMERGES, rank_channels
from prismlm.probes.channels.effects import (
    Probe,
    TableOptions,
    case_sets,
    effects_on,
    load_cases,
    probe_of,
    rank_sum_p,
    words_of,
)

TESTED = "mask_write"
"""The intervention by which a concept is judged; said before any is run."""


@dataclass(frozen=True)
class Settings:
    """What is read and drawn; see the options."""

    concepts: int
    words: int
    controls: int
    seed: int
    train_tokens: int | None
    heldout_tokens: int | None
    lag_tokens: int
    least: int
    common: int
    minimum_cases: int
    minimum_probability: float


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def choose_concepts(
    loaded: Loaded, gates: TokenGates, heldout: Sequences, settings: Settings
) -> tuple[list[Concept], int, dict[str, tuple[Probe, ...]]]:
    """Return the first concepts with enough held-out cases, and how many had too few."""
    candidates = propose_concepts(
        gates,
        loaded.tokenizer,
        count=8 * settings.concepts,
        words=settings.words,
        least=settings.least,
        common=settings.common,
    )
    cases = heldout_cases(
        loaded.model,
        loaded.tokenizer,
        {concept.name: [token.token_id for token in concept.tokens] for concept in candidates},
        heldout,
        minimum_probability=settings.minimum_probability,
    )
    kept: list[Concept] = []
    passed_over = 0
    for concept in candidates:
        if len(kept) == settings.concepts:
            break
        if len(cases[concept.name]) >= settings.minimum_cases:
            kept.append(concept)
        else:
            passed_over += 1
    return kept, passed_over, cases


def put_to_the_test(
    loaded: Loaded, concept: Concept, cases: tuple[Probe, ...], settings: Settings
) -> dict[str, Any]:
    """Return what interventions on a concept's channel do to its words in held-out text."""
    table = effects_on(
        loaded.model,
        cases,
        [(concept.layer, concept.channel)],
        _options(settings),
        progress=ConsoleReporter(),
    )
    return {
        "layer": concept.layer,
        "channel": concept.channel,
        "words": [asdict(token) for token in concept.tokens],
        "difference": concept.difference,
        "half_life": float(half_lives(loaded.model)[concept.layer][concept.channel]),
        "controls": [list(c) for c in table.controls[concept.layer, concept.channel]],
        "baseline": float(table.baseline.median()),
        "effects": [_effect(row) for row in table.summary().rows],
    }


def overall(concepts: Iterable[dict[str, Any]], controls: int) -> float | None:
    """Return the chance that ranks among controls are at least this good over all concepts.

    Each concept counts once, by the rank of its channel's median size: channels, not cases, are
    what varies here.
    """
    ranks = [
        controls + 1 - effect["rank"]
        for concept in concepts
        for effect in concept["effects"]
        if effect["intervention"] == TESTED
    ]
    return rank_sum_p(ranks, controls) if ranks else None


def words_in(
    loaded: Loaded,
    concepts: Sequence[Concept],
    train: Sequences,
    heldout: Sequences,
    settings: Settings,
) -> dict[str, Any]:
    """Return the channel of every concept's words in one model, and the bundled sets' beside."""
    sets = {name: load_cases(name) for name in case_sets()}
    wanted = {concept.name: concept.words for concept in concepts}
    wanted |= {name: words_of(cases) for name, cases in sets.items()}
    tokenizer = loaded.tokenizer
    reading = {"total": train.tokens, "progress": ConsoleReporter()}
    read = read_activations(loaded.model, train.batches(), ("write",), **reading)
    members = {c.name: [token.token_id for token in c.tokens] for c in concepts}
    probes: dict[str, tuple[Probe, ...]] = {}
    if members:
        probes = heldout_cases(
            loaded.model,
            tokenizer,
            members,
            heldout,
            minimum_probability=settings.minimum_probability,
        )
    # Of a word that is several tokens, the first is what is predicted.
    probes |= {
        name: tuple(probe_of(tokenizer, case, first_token=True) for case in cases)
        for name, cases in sets.items()
    }
    rows = [
        _word_row(loaded, read, words, name, probes[name], settings)
        for name, words in wanted.items()
    ]
    for row in rows:
        row["bundled"] = row["name"] in sets
    return {"model": loaded.name, "rows": rows}


def _word_row(
    loaded: Loaded,
    read: Activations,
    words: Sequence[str],
    name: str,
    probes: tuple[Probe, ...],
    settings: Settings,
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "found": None, "effect": None, "said": None}
    try:
        found = rank_channels(read, loaded.tokenizer, words, seed=settings.seed)
        best = found.rows[0]
        kept = ("others_mean", "others_deviation", "shuffled_mean", "shuffled_deviation", "p")
        row["found"] = best | {name: found[name] for name in kept} | {
            "occurrences": sum(found["words"].values()),
            "emerges": found["p"] < EMERGES,
        }  # fmt: skip
        table = effects_on(
            loaded.model,
            probes,
            [(best["layer"], best["channel"])],
            replace(_options(settings), interventions=(TESTED,)),
        )
    except InputError as error:
        row["said"] = str(error)
        return row
    row["effect"] = _effect(table.summary().rows[0])
    return row


def _options(settings: Settings) -> TableOptions:
    return TableOptions(
        controls=settings.controls,
        minimum_probability=settings.minimum_probability,
        seed=settings.seed,
    )


def _effect(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a summary with its interval as a pair, or None."""
    ends = row["low"], row["high"]
    left_out = ("low", "high", "largest_control")
    kept = {name: value for name, value in row.items() if name not in left_out}
    return kept | {"interval": None if ends[0] is None else ends}
