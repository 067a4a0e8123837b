"""What the channels of trained ProtoTs hold: ten unselected, and concepts put to the test.

    python -m benchmarks.prototype_mixer.channels MODEL [MODEL …] --corpus DIR

Several models are seeds of one recipe. Ten channels of the first are drawn by a seed. Concepts are
proposed by the write gate on the training split; then words of theirs that come again in held-out
text are predicted with and without the channel, beside channels drawn as controls from its layer.
Writes docs/results/channels.json; `python -m benchmarks.prototype_mixer.render_channels` makes
the page of it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.shared.environment import environment
from prismlm.cli.progress import ConsoleReporter
from prismlm.corpus import Corpus
from prismlm.corpus.sequences import Sequences
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.errors import InputError
from prismlm.files import write_json
from prismlm.instruments.channels import (
    INTERVENTIONS,
    Concept,
    Probe,
    TokenGates,
    TopSequences,
    WordForms,
    case_sets,
    concept_tokens,
    effects_on,
    found_in,
    heldout_cases,
    load_cases,
    measure,
    probe_of,
    propose_concepts,
    quartiles,
    rank_sequences,
    read_write_lags,
    repetition,
    sequences_of,
    spearman,
    token_gates,
)
from prismlm.instruments.channels.case_files import words_of
from prismlm.instruments.channels.chance import rank_sum_p
from prismlm.instruments.channels.inspection import EMERGES
from prismlm.instruments.channels.word_forms import continuing
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.decoders.mixers import half_lives

CHANNELS_SHOWN = 10
SEQUENCES_SHOWN = 3
TOKENS_SHOWN = 8
EXCERPT = 200
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


def main() -> None:
    """Measure and write."""
    given = _arguments()
    corpus = Corpus.open(given.corpus)
    settings = Settings(
        given.concepts,
        given.words,
        given.controls,
        given.seed,
        given.train_tokens or None,
        given.heldout_tokens or None,
        given.lag_tokens,
        given.least,
        given.common,
        given.minimum_cases,
        given.minimum_probability,
    )
    models: list[Loaded] = []
    for path in given.models:
        model, tokenizer = read_checkpoint(path)
        check_tokenizer_of(corpus, tokenizer, Path(path).name)
        models.append(Loaded(path.resolve().name, model, tokenizer))
    write_json(given.out, study(models, corpus, settings))
    print(f"wrote {given.out}")


def study(models: list[Loaded], corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """Return everything that the page shows."""
    first = models[0]
    train = Sequences(corpus, "train", max_tokens=settings.train_tokens)
    heldout = Sequences(corpus, "heldout", max_tokens=settings.heldout_tokens)
    gates = token_gates(first.model, train, progress=ConsoleReporter())
    concepts, passed_over, cases = choose_concepts(first, gates, heldout, settings)
    best = rank_sequences(first.model, heldout)
    tested = [
        put_to_the_test(first, concept, cases[concept.name], settings) for concept in concepts
    ]
    return {
        "environment": environment(),
        "settings": asdict(settings) | {"corpus": corpus.name, "tested": TESTED},
        "model": _described(first),
        "channels": unselected(first, gates, best, corpus, settings.seed),
        "concepts": tested,
        "overall": overall(tested, settings.controls),
        "passed_over": passed_over,
        "models": [words_in(loaded, concepts, train, heldout, settings) for loaded in models],
        "locality": locality(first, best),
        "measures": {
            kind: [asdict(layer) for layer in measure(first.model, heldout, kind)]
            for kind in ("write", "read")
        },
        "lags": lags(first, corpus, settings),
    }


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
        controls=settings.controls,
        interventions=INTERVENTIONS,
        minimum_probability=settings.minimum_probability,
        seed=settings.seed,
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
        "effects": [asdict(s) | {"beats_controls": s.beats_controls} for s in table.summaries()],
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
    forms = {name: WordForms.of(tokenizer, words) for name, words in wanted.items()}
    # Two concepts may have a word in common, and each counts its own.
    together = WordForms(
        {_word(name, w): form for name, own in forms.items() for w, form in own.forms.items()},
        continuing(tokenizer),
    )
    gates = token_gates(loaded.model, train, together, progress=ConsoleReporter())
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
    rows = [_word_row(loaded, gates, forms[name], name, probes[name], settings) for name in wanted]
    for row in rows:
        row["bundled"] = row["name"] in sets
    return {"model": loaded.name, "rows": rows}


def _word(concept: str, word: str) -> str:
    return f"{concept}: {word}"


def _word_row(
    loaded: Loaded,
    gates: TokenGates,
    forms: WordForms,
    name: str,
    probes: tuple[Probe, ...],
    settings: Settings,
) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "found": None, "effect": None, "said": None}
    own = replace(gates, words={word: gates.words[_word(name, word)] for word in forms.forms})
    try:
        found = found_in(own, loaded.tokenizer, forms, seed=settings.seed)
        row["found"] = asdict(found.best) | {
            "occurrences": sum(found.words.values()),
            "others_mean": found.others_mean,
            "others_deviation": found.others_deviation,
            "shuffled_mean": found.shuffled_mean,
            "shuffled_deviation": found.shuffled_deviation,
            "p": found.p,
            "emerges": found.p < EMERGES,
        }
        table = effects_on(
            loaded.model,
            probes,
            [(found.best.layer, found.best.channel)],
            controls=settings.controls,
            interventions=(TESTED,),
            minimum_probability=settings.minimum_probability,
            seed=settings.seed,
        )
    except InputError as error:
        row["said"] = str(error)
        return row
    (summary,) = table.summaries()
    row["effect"] = asdict(summary) | {"beats_controls": summary.beats_controls}
    return row


def unselected(
    loaded: Loaded, gates: TokenGates, best: dict[int, TopSequences], corpus: Corpus, seed: int
) -> list[dict[str, Any]]:
    """Return channels drawn by a seed, with the tokens and sequences that write most."""
    lives = half_lives(loaded.model)
    places = [(layer, channel) for layer, life in enumerate(lives) for channel in range(len(life))]
    order = np.random.default_rng(seed).permutation(len(places))[:CHANNELS_SHOWN]
    return [
        {
            "layer": layer,
            "channel": channel,
            "half_life": float(lives[layer][channel]),
            "mean_gate": float(gates.mean(layer)[channel]),
            "tokens": [
                asdict(token)
                for token in concept_tokens(
                    gates, loaded.tokenizer, layer, channel, count=TOKENS_SHOWN
                )
            ],
            "sequences": [
                _shortened(sequence, corpus)
                for sequence in sequences_of(best[layer], channel)[:SEQUENCES_SHOWN]
            ],
        }
        for layer, channel in (places[i] for i in order.tolist())
    ]


def _shortened(sequence: Any, corpus: Corpus) -> dict[str, Any]:
    """Return the text around the token that writes most, with that token."""
    token = sequence.tokens[0]
    document = corpus.document_at(token.position)
    text, spans = corpus.text(document), corpus.spans(document)
    first = int(corpus.starts[document])
    start, end = spans[token.position - first].tolist()
    left = max(int(spans[sequence.start - first][0]), start - EXCERPT // 2)
    last = sequence.start - first + sequence.length - 1
    right = min(int(spans[last][1]), end + EXCERPT // 2)
    return {
        "document": corpus.doc_ids[document],
        "total": sequence.total,
        "length": sequence.length,
        "before": text[left:start],
        "token": text[start:end],
        "after": text[end:right],
        "gate": token.gate,
    }


def locality(loaded: Loaded, best: dict[int, TopSequences]) -> dict[str, Any]:
    """Return whether channels of a short half-life keep to few tokens."""
    lives = torch.cat(half_lives(loaded.model))
    scores = torch.cat([repetition(best[layer]) for layer in sorted(best)])
    try:
        return {
            "spearman": asdict(spearman(lives, scores)),
            "quartiles": _finite(asdict(quartiles(lives, scores))),
            "said": None,
        }
    except InputError as error:
        return {"spearman": None, "quartiles": None, "said": str(error)}


def lags(loaded: Loaded, corpus: Corpus, settings: Settings) -> list[dict[str, Any]]:
    """Return at which lag reading and writing hang together, by layer, beside shuffled reading."""
    text = Sequences(corpus, "heldout", max_tokens=settings.lag_tokens)
    rows: list[dict[str, Any]] = []
    for layer, found in read_write_lags(loaded.model, text, seed=settings.seed).items():
        known = torch.isfinite(found.p)
        peaks = found.peak[known].tolist()
        rows.append(
            {
                "layer": layer,
                "channels": len(peaks),
                "peaks": {str(lag): peaks.count(lag) for lag in found.lags.tolist()},
                "beyond_chance": int((found.p[known] < EMERGES).sum()),
                "correlation": _finite(found.correlation[known].nanmean(0).tolist()),
                "null_mean": _finite(found.null_mean[known].nanmean(0).tolist()),
            }
        )
    return rows


def _finite(value: Any) -> Any:
    """Return a value with None for what is not a number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _described(loaded: Loaded) -> dict[str, Any]:
    lives = half_lives(loaded.model)
    return {
        "name": loaded.name,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "layers": len(lives),
        "channels": [len(life) for life in lives],
        "half_lives": [
            [float(q) for q in torch.quantile(life, torch.tensor([0.0, 0.5, 1.0]).double())]
            for life in lives
        ],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--out", type=Path, default=Path("docs/results/channels.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
