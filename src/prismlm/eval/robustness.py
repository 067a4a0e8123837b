"""How much predictions change with a text: perturbations that keep its meaning, flips that do not.

    JS(p(·|x), p(·|x′)),   overlap of the top 10,   Spearman's ρ,   the same top token

A model of flatter predictions has a smaller JS whatever it reads, so JS is also taken with each
model at the temperature at which its mean entropy over the originals is one target. Ranks do not
depend on a temperature.

Source: ProtoT, §5.2, Tables 3 and 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.errors import InputError, check_whole
from prismlm.eval import next_token
from prismlm.eval.benchmarks import drawn
from prismlm.eval.pairs import INTERVENTIONS, SLICES
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import mean_intervals

FIGURES = {
    "js": next_token.jensen_shannon,
    "overlap": next_token.top_overlap,
    "spearman": next_token.rank_correlation,
    "same_top": next_token.same_top,
}
MEASURES = ("js", "js_matched", "overlap", "spearman", "same_top")
Sides = tuple[np.ndarray, np.ndarray]


class Pair(NamedTuple):
    """A text and what became of it."""

    id: str
    slice: str
    original: str
    perturbed: str


class OpenedModel(NamedTuple):
    """A model under the name that its figures stand under."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def drawn_pairs(table: pa.Table, limit: int | None = None, seed: int = 0) -> list[Pair]:
    """Return the pairs, or ``limit`` of each slice drawn by ``seed``, slice by slice."""
    if limit is not None:
        check_whole("the limit", limit, 1)
    check_whole("the seed", seed)
    rows = [Pair(**row) for row in table.select(list(Pair._fields)).to_pylist()]
    found: list[Pair] = []
    for name in SLICES + INTERVENTIONS:
        own = [row for row in rows if row.slice == name]
        found += [own[number] for number in drawn(len(own), limit, seed)]
    return found


def texts_of(pairs: Sequence[Pair]) -> dict[str, int]:
    """Return the row of each different text, originals first."""
    texts = itertools.chain((p.original for p in pairs), (p.perturbed for p in pairs))
    return {text: row for row, text in enumerate(dict.fromkeys(texts))}


def measure_robustness(
    models: Iterable[OpenedModel],
    pairs: Sequence[Pair],
    *,
    entropy: float | None = None,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Row:
    """Compare what models predict after each text with what they predict after its variant.

    Args:
        models: of different names; each is asked for when the one before has been read with.
        pairs: of :func:`drawn_pairs`.
        entropy: the target in nats; None for the lowest of the models' own.
        seed: of the bootstrap.
        progress: shows the texts.

    Returns:
        The ``target`` entropy in nats; pairs ``left_out``, with a text of no tokens or of more than
        a model has positions for; the ``seed``; ``models``, each with its ``name``, its mean
        ``entropy`` over the originals at temperature 1, the ``temperature`` at which it is the
        target, and a fingerprint of its ``vocabulary``; whether they are all ``comparable``, over
        one vocabulary, without which JS is not; and ``slices``, each with its ``name`` and
        ``pairs``, ``models``, for each model each of :data:`MEASURES`, and ``differences`` ``of``
        each two models, the first minus the second, paired.
    """
    texts = texts_of(pairs)
    sides = [
        np.array([texts[pair.original] for pair in pairs]),
        np.array([texts[pair.perturbed] for pair in pairs]),
    ]
    logits: dict[str, np.ndarray] = {}
    vocabularies: dict[str, str] = {}
    usable = np.ones(len(pairs), dtype=bool)
    for name, model, tokenizer in models:
        if name in logits:
            raise InputError(f"two models are called {name}: give each one a name of its own.")
        rows = next_token.encode(tokenizer, list(texts))
        fits = np.array([next_token.readable(model, row) for row in rows])
        usable &= fits[sides[0]] & fits[sides[1]]
        with progress.task(name, int(fits.sum()), "texts") as task:
            logits[name] = next_token.kept_logits(model, rows, task.advance)
        vocabularies[name] = fingerprints.of_json(sorted(tokenizer.get_vocab().items()))
    if not logits or not usable.any():
        raise InputError("nothing to compare: expected a model, and a pair that all models read.")
    both = sides[0][usable], sides[1][usable]
    own = {name: next_token.mean_entropy(kept, both[0]) for name, kept in logits.items()}
    target = min(own.values()) if entropy is None else float(entropy)
    found: list[Row] = []
    values: dict[str, np.ndarray] = {}
    for name, kept in logits.items():
        temperature = next_token.matching_temperature(kept, both[0], target)
        values[name] = _measured(kept, both, temperature)
        row = {"name": name, "entropy": own[name], "temperature": temperature}
        found.append(row | {"vocabulary": vocabularies[name]})
    slices = np.array([pair.slice for pair in pairs])[usable]
    return {
        "target": target,
        "left_out": int((~usable).sum()),
        "seed": seed,
        "models": found,
        "slices": [
            _slice(name, {model: own[slices == name] for model, own in values.items()}, seed)
            for name in SLICES + INTERVENTIONS
            if (slices == name).any()
        ],
        "comparable": len(set(vocabularies.values())) == 1,
        "unit": "bits",
    }


def _measured(logits: np.ndarray, pairs: Sides, temperature: float) -> np.ndarray:
    """Return each of ``MEASURES`` for each pair, [pairs, measures]."""
    found = {key: next_token.in_parts(figure, logits, pairs) for key, figure in FIGURES.items()}
    found["js_matched"] = next_token.in_parts(FIGURES["js"], logits, pairs, temperature)
    return np.stack([found[key] for key in MEASURES], 1)


def _slice(name: str, values: dict[str, np.ndarray], seed: int) -> Row:
    several = list(itertools.combinations(values, 2))
    apart = [values[one] - values[other] for one, other in several]
    intervals = mean_intervals(np.concatenate([*values.values(), *apart], 1), seed=seed)
    parts = [
        dict(zip(MEASURES, intervals[first:], strict=False))
        for first in range(0, len(intervals), len(MEASURES))
    ]
    return {
        "name": name,
        "pairs": len(next(iter(values.values()))),
        "models": dict(zip(values, parts, strict=False)),
        "differences": [
            {"of": list(two)} | part
            for two, part in zip(several, parts[len(values) :], strict=True)
        ],
    }
