"""How much predictions change with a text, under perturbations and under changes of meaning.

    JS(p(·|x), p(·|x′)),   overlap of the top 10,   Spearman's ρ,   the same top token

A model with flatter predictions has a smaller JS on any text, so JS is also measured with each
model at the temperature that gives all models the same mean entropy over the originals.

Source: ProtoT, §5.2, Tables 3 and 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prismlm import fingerprints
from prismlm.errors import InputError
from prismlm.eval import next_token
from prismlm.eval.pairs import Pair
from prismlm.probes.results import Row
from prismlm.progress import SILENT, Reporter
from prismlm.statistics import mean_intervals

FIGURES = {
    "overlap": next_token.top_overlap,
    "spearman": next_token.rank_correlation,
    "same_top": next_token.same_top,
}
MEASURES = ("js", "js_matched", *FIGURES)


class OpenedModel(NamedTuple):
    """A model and its name in the results."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def index_texts(pairs: Sequence[Pair]) -> dict[str, int]:
    """Return the row of each different text, originals first."""
    texts = [p.original for p in pairs] + [p.perturbed for p in pairs]
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

    Pairs are ``left_out`` if a model cannot read one of the texts. ``target`` is the mean entropy
    in nats at which JS is matched, by default the lowest of the models'; each model has its own
    mean ``entropy`` over the originals, and the ``temperature`` at which it is the target. JS is
    ``comparable`` over one vocabulary only. Each slice has each of :data:`MEASURES` for each
    model, and paired ``differences`` ``of`` each two models.
    """
    texts = index_texts(pairs)
    rows = np.array([(texts[pair.original], texts[pair.perturbed]) for pair in pairs])
    logits, vocabularies, usable = _read(models, list(texts), rows, progress)
    if not logits or not usable.any():
        raise InputError("nothing to compare: expected a model, and a pair that all models read.")
    before, after = rows[usable].T
    entropies = {name: next_token.mean_entropy(x, before) for name, x in logits.items()}
    target = min(entropies.values()) if entropy is None else float(entropy)
    rows_of_models: list[Row] = []
    values: dict[str, np.ndarray] = {}
    for name, x in logits.items():
        temperature = next_token.matching_temperature(x, before, target)
        row = {"name": name, "entropy": entropies[name], "temperature": temperature}
        rows_of_models.append(row | {"vocabulary": vocabularies[name]})
        columns = [
            next_token.in_chunks(next_token.jensen_shannon, x, before, after, temperature=t)
            for t in (1.0, temperature)
        ]
        columns += [next_token.in_chunks(f, x, before, after) for f in FIGURES.values()]
        values[name] = np.stack(columns, 1)
    slices = np.array([pair.slice for pair in pairs])[usable]
    return {
        "target": target,
        "left_out": int((~usable).sum()),
        "seed": seed,
        "models": rows_of_models,
        "slices": [
            _slice(name, {model: x[slices == name] for model, x in values.items()}, seed)
            for name in dict.fromkeys(slices.tolist())
        ],
        "comparable": len(set(vocabularies.values())) == 1,
        "unit": "bits",
    }


def _read(
    models: Iterable[OpenedModel], texts: list[str], rows: np.ndarray, progress: Reporter
) -> tuple[dict[str, np.ndarray], dict[str, str], np.ndarray]:
    """Return the logits and vocabulary of each model, and a mask of pairs that all can read."""
    logits: dict[str, np.ndarray] = {}
    vocabularies: dict[str, str] = {}
    usable = np.ones(len(rows), dtype=bool)
    for name, model, tokenizer in models:
        if name in logits:
            raise InputError(f"two models are called {name}: give each a different name.")
        tokens = next_token.encode(model, tokenizer, texts)
        usable &= np.array([bool(row) for row in tokens])[rows].all(1)
        with progress.task(name, sum(map(bool, tokens)), "texts") as task:
            logits[name] = next_token.logits_on_disk(model, tokens, task.advance)
        vocabularies[name] = fingerprints.of_json(sorted(tokenizer.get_vocab().items()))
    return logits, vocabularies, usable


def _slice(name: str, values: dict[str, np.ndarray], seed: int) -> Row:
    """Return the mean figures of each model, and differences of each two, with intervals."""
    couples = list(itertools.combinations(values, 2))
    differences = [values[first] - values[second] for first, second in couples]
    columns = np.concatenate([*values.values(), *differences], 1)
    intervals = iter(mean_intervals(columns, seed=seed))
    return {
        "name": name,
        "pairs": len(columns),
        "models": {model: {key: next(intervals) for key in MEASURES} for model in values},
        "differences": [
            {"of": list(couple)} | {key: next(intervals) for key in MEASURES} for couple in couples
        ],
    }
