"""What the channels of trained ProtoTs hold: five unselected, and concepts put to the test.

    python -m benchmarks.prototype_mixer.channels MODEL [MODEL …] --corpus DIR
    python -m benchmarks.render channels

Several models are seeds of one recipe. Five channels of the first are drawn by a seed. Concepts are
proposed by the write gate on the training split; then their words are predicted in held-out text
with and without the channel, and with random channels of its layer as controls.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.prototype_mixer.channel_concepts import (
    Concept,
    TokenGates,
    heldout_cases,
    propose_concepts,
    top_tokens,
)
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.files import write_json
from prismlm.lens.labels.contexts import Vocabulary
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.decoders.protot import half_lives
from prismlm.probes.channels.activations import Activations, read_activations
from prismlm.probes.channels.concepts import EMERGES, rank_channels
from prismlm.probes.channels.effects import Probe, TableOptions, effects_on, rank_sum_p
from prismlm.probes.channels.report import channel_report, measure_layers
from prismlm.statistics import spearman

# The intervention by which a concept is judged, chosen before any was run.
TESTED = "mask_write"
CHANNELS_SHOWN, TOKENS_SHOWN, LEAST_SHOWN = 5, 8, 20
Row = dict[str, Any]


class Loaded(NamedTuple):
    """A model with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def main() -> None:
    """Measure and write."""
    parser = script_options(__doc__, RESULTS / "channels.json")
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--concepts", type=int, default=6)
    parser.add_argument("--words", type=int, default=4, help="of each concept")
    parser.add_argument("--controls", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-tokens", type=int, default=1_000_000, help="0 for all")
    parser.add_argument("--heldout-tokens", type=int, default=0, help="0 for all")
    parser.add_argument("--lag-tokens", type=int, default=20_000)
    parser.add_argument("--least", type=int, default=100, help="occurrences of a word")
    parser.add_argument("--common", type=int, default=100, help="most frequent tokens left out")
    parser.add_argument("--minimum-cases", type=int, default=10)
    parser.add_argument("--minimum-probability", type=float, default=0.01)
    options = parser.parse_args()
    corpus = Corpus.open(options.corpus)
    models: list[Loaded] = []
    for path in options.models:
        model, tokenizer = read_checkpoint(path)
        check_tokenizer_of(corpus, tokenizer, Path(path).name)
        models.append(Loaded(path.resolve().name, model, tokenizer))
    write_json(options.out, study(models, corpus, options))
    print(f"wrote {options.out}")


def study(models: list[Loaded], corpus: Corpus, options: argparse.Namespace) -> Row:
    """Return everything that the page shows."""
    first = models[0]
    train = Sequences(corpus, "train", max_tokens=options.train_tokens or None)
    heldout = Sequences(corpus, "heldout", max_tokens=options.heldout_tokens or None)
    gates = TokenGates.from_activations(write_gates(first, train), first.model.config.vocab_size)
    concepts, passed_over, cases = choose_concepts(first, gates, heldout, options)
    tested = [concept_row(first, c, cases[c.name], options) for c in concepts]
    settings = {k: v for k, v in vars(options).items() if k not in ("models", "out")}
    lives = half_lives(first.model)
    return {
        "environment": environment(),
        "settings": settings | {"corpus": corpus.name, "tested": TESTED},
        "model": {
            "name": first.name,
            "parameters": sum(p.numel() for p in first.model.parameters()),
            "layers": len(lives),
            "channels": [len(life) for life in lives],
        },
        "channels": unselected(first, gates, options.seed),
        "concepts": tested,
        "overall": overall(tested, options.controls),
        "passed_over": passed_over,
        "models": [words_in(loaded, concepts, train, heldout, options) for loaded in models],
        "locality": locality(first, heldout),
        "measures": {
            kind: list(measure_layers(first.model, heldout, kind)) for kind in ("write", "read")
        },
        "lags": lags(first, corpus, options),
    }


def write_gates(loaded: Loaded, train: Sequences) -> Activations:
    """Return the write gates of every position."""
    reading: Row = {"total": train.tokens, "progress": ConsoleReporter()}
    return read_activations(loaded.model, train.batches(), ("write",), **reading)


def cases_of(
    loaded: Loaded, concepts: Iterable[Concept], heldout: Sequences, options: argparse.Namespace
) -> dict[str, tuple[Probe, ...]]:
    """Return the held-out cases of each concept."""
    tokens = {c.name: [token.token_id for token in c.tokens] for c in concepts}
    minimum = options.minimum_probability
    return heldout_cases(
        loaded.model, loaded.tokenizer, tokens, heldout, minimum_probability=minimum
    )


def choose_concepts(
    loaded: Loaded, gates: TokenGates, heldout: Sequences, options: argparse.Namespace
) -> tuple[list[Concept], int, dict[str, tuple[Probe, ...]]]:
    """Return the first concepts with enough held-out cases, how many had too few, and cases."""
    candidates = propose_concepts(
        gates,
        loaded.tokenizer,
        count=8 * options.concepts,
        words=options.words,
        least=options.least,
        common=options.common,
    )
    cases = cases_of(loaded, candidates, heldout, options)
    enough = [c for c in candidates if len(cases[c.name]) >= options.minimum_cases]
    chosen = enough[: options.concepts]
    complete = len(chosen) == options.concepts
    seen = candidates.index(chosen[-1]) + 1 if complete else len(candidates)
    return chosen, seen - len(chosen), cases


def concept_row(
    loaded: Loaded, concept: Concept, cases: tuple[Probe, ...], options: argparse.Namespace
) -> Row:
    """Return what masking a concept's channel does to its words in held-out text."""
    place = concept.layer, concept.channel
    return {
        "layer": concept.layer,
        "channel": concept.channel,
        "words": [asdict(token) for token in concept.tokens],
        "difference": concept.difference,
        "half_life": float(half_lives(loaded.model)[concept.layer][concept.channel]),
        "effects": [effect_of(loaded, cases, place, options)],
    }


def effect_of(
    loaded: Loaded, cases: tuple[Probe, ...], place: tuple[int, int], options: argparse.Namespace
) -> Row:
    """Return the effect of the tested intervention on a channel, with its controls."""
    table_options = TableOptions(
        controls=options.controls,
        minimum_probability=options.minimum_probability,
        seed=options.seed,
        interventions=(TESTED,),
    )
    row = effects_on(loaded.model, cases, [place], table_options).summary().rows[0]
    left_out = ("low", "high", "largest_control")
    interval = None if row["low"] is None else (row["low"], row["high"])
    return {k: v for k, v in row.items() if k not in left_out} | {"interval": interval}


def overall(concepts: Iterable[Row], controls: int) -> float | None:
    """Return the chance that ranks among controls are at least this good over all concepts.

    Channels vary here, not cases: a concept counts once, by the rank of its channel's median size.
    """
    ranks = [controls + 1 - effect["rank"] for c in concepts for effect in c["effects"]]
    return rank_sum_p(ranks, controls) if ranks else None


def words_in(
    loaded: Loaded,
    concepts: Sequence[Concept],
    train: Sequences,
    heldout: Sequences,
    options: argparse.Namespace,
) -> Row:
    """Return for every concept which channel of one model its words write into."""
    cases = cases_of(loaded, concepts, heldout, options)
    read = write_gates(loaded, train)
    return {
        "model": loaded.name,
        "rows": [word_row(loaded, read, c, cases[c.name], options) for c in concepts],
    }


def word_row(
    loaded: Loaded,
    read: Activations,
    concept: Concept,
    cases: tuple[Probe, ...],
    options: argparse.Namespace,
) -> Row:
    """Return the channel that a concept's words write into most, and its effect on them."""
    row: Row = {"name": concept.name, "found": None, "effect": None, "said": None}
    try:
        ranks = rank_channels(read, loaded.tokenizer, concept.words, seed=options.seed)
        best = ranks.rows[0]
        row["found"] = best | {"p": ranks["p"], "emerges": ranks["p"] < EMERGES}
        row["effect"] = effect_of(loaded, cases, (best["layer"], best["channel"]), options)
    except InputError as error:
        row["said"] = str(error)
    return row


def unselected(loaded: Loaded, gates: TokenGates, seed: int) -> list[Row]:
    """Return channels drawn by a seed, with the tokens that write most."""
    lives = half_lives(loaded.model)
    places = [(layer, channel) for layer, life in enumerate(lives) for channel in range(len(life))]
    order = np.random.default_rng(seed).permutation(len(places))[:CHANNELS_SHOWN].tolist()
    texts = Vocabulary(loaded.tokenizer, len(loaded.tokenizer)).texts
    eligible = gates.count >= LEAST_SHOWN
    return [
        {
            "layer": layer,
            "channel": channel,
            "half_life": float(lives[layer][channel]),
            "tokens": [
                asdict(token)
                for token in top_tokens(gates, texts, (layer, channel), eligible, TOKENS_SHOWN)
            ],
        }
        for layer, channel in (places[i] for i in order)
    ]


def locality(loaded: Loaded, text: Sequences) -> Row:
    """Return the rank correlation of half-life and repetition over all channels."""
    report = channel_report(loaded.model, loaded.tokenizer, text)
    channels = [channel for layer in report.layers for channel in layer.channels]
    lives, scores = (
        np.array([channel[key] for channel in channels], dtype=np.float64)
        for key in ("half_life", "repetition")
    )
    return {"spearman": asdict(spearman(lives, scores))}


def lags(loaded: Loaded, corpus: Corpus, options: argparse.Namespace) -> list[Row]:
    """Return by layer at which lag the read and write gates of channels correlate most."""
    text = Sequences(corpus, "heldout", max_tokens=options.lag_tokens)
    rows: list[Row] = []
    for layer in channel_report(loaded.model, loaded.tokenizer, text, seed=options.seed).layers:
        figures = layer.lags
        assert figures is not None
        peaks = figures["peak"][torch.isfinite(figures["p"])].tolist()
        counts = {str(lag): peaks.count(lag) for lag in figures["lags"].tolist()}
        rows.append({"layer": layer.layer, "channels": len(peaks), "peaks": counts})
    return rows


if __name__ == "__main__":
    main()
