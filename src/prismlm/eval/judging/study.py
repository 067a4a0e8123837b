"""The study: a judge is examined; models continue prompts and are compared by BLEU and ratings.

Each model's continuations and every verdict of an endpoint are stored, so that the same command
resumes, and only models or judges that are added later are run.

With E_ij = 1 / (1 + 10^((R_j − R_i) / 400)), and a game of i against j that scores s for i:

- *online Elo*: R_i ← R_i + 4 (s − E_ij), R_j ← R_j − 4 (s − E_ij), from 1,000 each, game after
  game. It depends on the order of games, so it is the mean over shuffled resamples of prompts.
- *Bradley–Terry*: the R of mean 1,000 that maximise Σ s log E_ij + (1 − s) log E_ji over all games,
  a tie being half a win each: a logistic regression, independent of the order.

Chiang et al. 2024; games of a prompt are resampled together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prismlm import fingerprints
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt, Writing, bleu_figures, continue_prompts
from prismlm.eval.judging.judges import (
    Judge,
    Judged,
    Pair,
    examine,
    order_figures,
)
from prismlm.eval.runs import make_parts, read_part
from prismlm.files import keep_json
from prismlm.models.checkpoint import read_checkpoint
from prismlm.outputs import write_table
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import begin, keeping, writing
from prismlm.statistics import Interval, bootstrap

FORMAT_VERSION = 1
RESULT_FILE = "judge.json"
CONTINUATIONS, VERDICTS = "continuations", "verdicts.jsonl"
CONTINUATIONS_TABLE, VERDICTS_TABLE = "continuations.parquet", "verdicts.parquet"
PACKAGES = ("prismlm", "torch", "transformers", "tokenizers", "sacrebleu")
START, STEP, SCALE = 1000.0, 4.0, 400 / np.log(10)
ROUNDS = 1000
# The likelihood of a player that never loses has no maximum: ratings end so far from their mean.
MAX_DISTANCE = 2000.0
NEWTON_STEPS, MAX_NEWTON_STEP = 200, 1.0


def named(models: Sequence[Path]) -> dict[str, Path]:
    """Return directories by name, or by path where names are the same."""
    resolved = [path.resolve() for path in models]
    for path in models:
        if resolved.count(path.resolve()) > 1:
            raise InputError(f"{path} is given twice: give each model once.")
        if not path.is_dir():
            raise InputError(f"there is no model directory {path}.")
    # A link has its own name.
    names = [os.path.basename(os.path.abspath(path)) for path in models]
    keys = [n if names.count(n) == 1 else str(p) for n, p in zip(names, models, strict=True)]
    return dict(zip(keys, models, strict=True))


def run_judging(
    models: Mapping[str, Path],
    prompts: Sequence[Prompt],
    settings: Writing,
    out: Path,
    judge: Callable[[Path], Judge] | None = None,
    *,
    progress: Reporter = SILENT,
) -> dict[str, Any]:
    """Compute what ``out`` lacks, write the tables and ``judge.json``, and return its content.

    Args:
        models: their directories, by unique names.
        prompts: that all models continue.
        settings: of the continuations.
        out: the directory of all results.
        judge: opens the judge, given the file of an endpoint's verdicts; None for BLEU alone.
        progress: shows the steps.
    """
    digest = fingerprints.of_json([asdict(prompt) for prompt in prompts])
    note = {"format_version": FORMAT_VERSION, "prompts": digest, **asdict(settings)}
    with writing(out / RESULT_FILE):
        opened = None if judge is None else judge(out / VERDICTS)
        started = (out / VERDICTS).is_file() or any(out.glob(f"{CONTINUATIONS}/*.json"))
        begin(out, note, made=started)
        with keeping(lambda: f"Continuations and verdicts so far are kept in {out}."):
            examined = ratings = None
            if opened is not None:
                figures = examine(opened, prompts, settings.seed, progress)
                examined = {"source": opened.source, **figures}
            texts = _continue_all(models, prompts, settings, out, note, progress)
            _write_continuations(out, prompts, texts)
            if opened is not None and examined is not None:
                if len(texts) > 1:
                    pairs = [
                        Pair(prompt.text, *both)
                        for prompt, *answers in zip(prompts, *texts.values(), strict=True)
                        for both in combinations(answers, 2)
                    ]
                    judged = opened.judge(pairs, "models", progress)
                    _write_verdicts(out, prompts, list(texts), judged)
                    figures = _ratings(judged, list(texts), len(prompts), settings.seed)
                    ratings = {"readable": examined["usable"], **figures}
                examined["asked"] = opened.asked()
        result = {
            "format_version": FORMAT_VERSION,
            "models": list(texts),
            "prompts": len(prompts),
            "settings": asdict(settings),
            "bleu": bleu_figures(prompts, texts, settings.seed),
            "judge": examined,
            "ratings": ratings,
            "versions": {package: version(package) for package in PACKAGES},
        }
        keep_json(out / RESULT_FILE, result)
    return result


def _continue_all(
    models: Mapping[str, Path],
    prompts: Sequence[Prompt],
    settings: Writing,
    out: Path,
    note: Mapping[str, Any],
    progress: Reporter,
) -> dict[str, list[str]]:
    """Return the continuations by each model, which are stored under its fingerprint."""
    texts: dict[str, list[str]] = {}
    for name, directory in models.items():
        model, tokenizer = read_checkpoint(directory)
        key = fingerprints.of_model(model)
        job = partial(continue_prompts, name, model, tokenizer, prompts, settings, progress)
        make_parts(out, CONTINUATIONS, note, {key: job})
        path = out / CONTINUATIONS / f"{key}.json"
        texts[name] = read_part(path, lambda part: [str(text) for text in part])
    return texts


def _write_continuations(
    out: Path, prompts: Sequence[Prompt], texts: Mapping[str, list[str]]
) -> None:
    rows = [
        {"model": name, **asdict(prompt), "continuation": text}
        for name, continuations in texts.items()
        for prompt, text in zip(prompts, continuations, strict=True)
    ]
    if rows:
        write_table(out / CONTINUATIONS_TABLE, pa.Table.from_pylist(rows))


def _write_verdicts(
    out: Path, prompts: Sequence[Prompt], models: Sequence[str], judged: Sequence[Judged]
) -> None:
    games = [(prompt.id, *pair) for prompt in prompts for pair in combinations(models, 2)]
    rows = [(*game, *pair, pair.score) for game, pair in zip(games, judged, strict=True)]
    names = ("id", "a", "b", "verdict_ab", "verdict_ba", "score_a")
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
    write_table(out / VERDICTS_TABLE, table)


def _ratings(
    judged: Sequence[Judged], models: Sequence[str], prompts: int, seed: int
) -> dict[str, Any]:
    """Return ratings of the models and figures of their pairs, from verdicts prompt by prompt."""
    values = [np.nan if pair.score is None else pair.score for pair in judged]
    scores = np.array(values).reshape(prompts, -1)
    pairs: list[dict[str, Any]] = []
    for (first, second), column in zip(combinations(models, 2), scores.T, strict=True):
        games = column[~np.isnan(column)]
        mean = bootstrap(games, seed=seed) if len(games) else Interval(np.nan, np.nan, np.nan)
        count = {"won": int((games > 0.5).sum()), "lost": int((games < 0.5).sum())}
        pair = {"first": first, "second": second, "games": len(games)}
        pairs.append(pair | count | {"score": asdict(mean)})
    rated = [
        {"model": name, **{kind: asdict(interval) for kind, interval in rating.items()}}
        for name, rating in zip(models, rate(scores, len(models), seed), strict=True)
    ]
    return {"models": rated, "pairs": pairs, "order": order_figures(judged)}


def online_elo(
    first: np.ndarray, second: np.ndarray, score: np.ndarray, players: int
) -> np.ndarray:
    """Return the ratings [rounds, players] after games in order.

    Args:
        first, second: players of each game, [rounds, games].
        score: of the first: 1, 0, or between; NaN: the game is skipped.
        players: number of players.
    """
    ratings, rows = np.full((len(first), players), START), np.arange(len(first))
    for one, other, points in zip(first.T, second.T, score.T, strict=True):
        gap = (ratings[rows, other] - ratings[rows, one]) / SCALE
        gain = np.nan_to_num(STEP * (points - 1 / (1 + np.exp(gap))))
        ratings[rows, one] += gain
        ratings[rows, other] -= gain
    return ratings


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Return the maximum-likelihood ratings [..., players], by Newton's method.

    ``wins`` [..., players, players] is the total score of i against j.
    """
    games = wins + wins.swapaxes(-1, -2)
    strength = np.zeros(wins.shape[:-1])
    for _ in range(NEWTON_STEPS):
        expected = 1 / (1 + np.exp(strength[..., None, :] - strength[..., :, None]))
        gradient = (wins - games * expected).sum(-1)
        variance = games * expected * (1 - expected)
        # The ones fix the mean, and 1e-9 on the diagonal players without games.
        hessian = np.eye(wins.shape[-1]) * (variance.sum(-1)[..., None] + 1e-9) - variance + 1
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        step = step.clip(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)
        strength = (strength + step).clip(-MAX_DISTANCE / SCALE, MAX_DISTANCE / SCALE)
        strength -= strength.mean(-1, keepdims=True)
        if np.abs(step).max() < 1e-10:
            break
    return START + SCALE * strength


def wins_of(scores: np.ndarray, players: int) -> np.ndarray:
    """Return total scores [..., players, players] of ``scores`` [..., prompts, pairs]."""
    wins = np.zeros((*scores.shape[:-2], players, players))
    for column, (i, j) in enumerate(combinations(range(players), 2)):
        wins[..., i, j] = np.nansum(scores[..., column], -1)
        wins[..., j, i] = np.nansum(1 - scores[..., column], -1)
    return wins


def rate(scores: np.ndarray, players: int, seed: int = 0) -> list[dict[str, Interval]]:
    """Return the ratings ``elo`` and ``bradley_terry`` of all players, with 95 % intervals.

    Args:
        scores: [prompts, pairs], of the first of each two players in order; NaN: no game.
        players: two or more.
        seed: of the resamples.
    """
    generator, pairs = np.random.default_rng(seed), np.array([*combinations(range(players), 2)])
    resampled = scores[generator.integers(len(scores), size=(ROUNDS, len(scores)))]
    games = np.broadcast_to(np.arange(scores.size), (ROUNDS, scores.size))
    order = generator.permuted(games, axis=1)
    shuffled = np.take_along_axis(resampled.reshape(ROUNDS, -1), order, 1)
    opponents = pairs[order % len(pairs)]
    online = online_elo(opponents[..., 0], opponents[..., 1], shuffled, players)
    fitted = bradley_terry(wins_of(resampled, players))
    values = {"elo": online.mean(0), "bradley_terry": bradley_terry(wins_of(scores, players))}
    ends = {
        name: np.percentile(rounds, (2.5, 97.5), axis=0).T
        for name, rounds in (("elo", online), ("bradley_terry", fitted))
    }
    return [
        {name: Interval(float(values[name][i]), *ends[name][i].tolist()) for name in values}
        for i in range(players)
    ]
