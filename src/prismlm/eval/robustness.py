"""How much predictions change with a text: perturbations that keep its meaning, flips that do not.

    JS(p(·|x), p(·|x′)),   overlap of the top 10,   Spearman's ρ,   the same top token

A model of flatter predictions has a smaller JS whatever it reads, so JS is also taken with each
model at the temperature at which its mean entropy over the originals is one target. Ranks do not
depend on a temperature.

Source: ProtoT, §5.2, Tables 3 and 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.errors import InputError, check_number, check_whole
from prismlm.eval import next_token
from prismlm.eval.benchmarks import drawn
from prismlm.eval.pairs import INTERVENTIONS, SLICES
from prismlm.instruments.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import mean_intervals

MEASURES = ("js", "js_matched", "overlap", "spearman", "same_top")
FIGURES = {
    "js": next_token.jensen_shannon,
    "overlap": next_token.top_overlap,
    "spearman": next_token.rank_correlation,
    "same_top": next_token.same_top,
}
Values = dict[str, np.ndarray]


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
    rows = [
        Pair(*(row[name] for name in Pair._fields))
        for row in table.select(list(Pair._fields)).to_pylist()
    ]
    found: list[Pair] = []
    for name in SLICES + INTERVENTIONS:
        own = [row for row in rows if row.slice == name]
        found += [own[number] for number in drawn(len(own), limit, seed)]
    return found


def texts_of(pairs: Sequence[Pair]) -> dict[str, int]:
    """Return the row of each different text, originals first."""
    texts = itertools.chain((p.original for p in pairs), (p.perturbed for p in pairs))
    return {text: row for row, text in enumerate(dict.fromkeys(texts))}


def _read(
    models: Iterable[OpenedModel],
    texts: list[str],
    sides: list[list[int]],
    pairs: int,
    progress: Reporter,
) -> tuple[dict[str, tuple[np.ndarray, str]], np.ndarray]:
    """Return logits and a fingerprint of the vocabulary by model, and which pairs all can read."""
    kept: dict[str, tuple[np.ndarray, str]] = {}
    usable = np.ones(pairs, dtype=bool)
    for name, model, tokenizer in models:
        if name in kept:
            raise InputError(f"two models are called {name}: give each one a name of its own.")
        rows = next_token.encode(tokenizer, texts)
        fits = np.array([next_token.readable(model, row) for row in rows])
        for side in sides:
            usable &= fits[side]
        with progress.task(name, int(fits.sum()), "texts") as task:
            logits = next_token.kept_logits(model, rows, task.advance)
        kept[name] = logits, fingerprints.of_json(sorted(tokenizer.get_vocab().items()))
    return kept, usable


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

    Raises:
        InputError: no model, two of one name, no pair that all can read, or an entropy that no
            temperature gives.
        NotFiniteError: a model's logits are not finite.
    """
    if entropy is not None:
        check_number("the entropy", entropy, "nats above 0", lambda nats: nats > 0)
    texts = texts_of(pairs)
    sides = [[texts[t] for t in side] for side in zip(*((p[2], p[3]) for p in pairs), strict=True)]
    kept, usable = _read(models, list(texts), sides, len(pairs), progress)
    if not kept or not usable.any():
        raise InputError("nothing to compare: expected a model, and a pair that all models read.")
    original, perturbed = (np.array(side)[usable] for side in sides)
    own = {name: next_token.mean_entropy(logits, original) for name, (logits, _) in kept.items()}
    target = min(own.values()) if entropy is None else float(entropy)
    found: list[Row] = []
    values: dict[str, Values] = {}
    for name, (logits, vocabulary) in kept.items():
        temperature = next_token.matching_temperature(logits, original, target)
        values[name] = _measured(logits, (original, perturbed), temperature)
        row = {"name": name, "entropy": own[name], "temperature": temperature}
        found.append(row | {"vocabulary": vocabulary})
    slices = np.array([pair.slice for pair in pairs])[usable]
    return {
        "target": target,
        "left_out": int((~usable).sum()),
        "seed": seed,
        "models": found,
        "slices": list(_slices(slices, values, seed)),
        "comparable": len({model["vocabulary"] for model in found}) == 1,
        "unit": "bits",
    }


def _measured(
    logits: np.ndarray, pairs: tuple[np.ndarray, np.ndarray], temperature: float
) -> Values:
    found = {key: next_token.in_parts(figure, logits, pairs) for key, figure in FIGURES.items()}
    matched = next_token.in_parts(next_token.jensen_shannon, logits, pairs, temperature)
    return found | {"js_matched": matched}


def _slices(slices: np.ndarray, values: dict[str, Values], seed: int) -> Iterator[Row]:
    several = list(itertools.combinations(values, 2))
    for name in SLICES + INTERVENTIONS:
        rows = slices == name
        if not rows.any():
            continue
        own = [found[key][rows] for found in values.values() for key in MEASURES]
        apart = [
            values[one][key][rows] - values[other][key][rows]
            for one, other in several
            for key in MEASURES
        ]
        intervals = iter(mean_intervals(np.stack(own + apart, 1), seed=seed))
        models = {model: dict(zip(MEASURES, intervals, strict=False)) for model in values}
        differences = [
            {"of": list(two)} | dict(zip(MEASURES, intervals, strict=False)) for two in several
        ]
        yield {
            "name": name,
            "pairs": int(rows.sum()),
            "models": models,
            "differences": differences,
        }
