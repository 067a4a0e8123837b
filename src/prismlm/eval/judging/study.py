"""The study: a judge is examined, models continue prompts, BLEU, verdicts of pairs, ratings.

Continuations and verdicts are kept one by one, so that the same command resumes, and models or
judges that are added later are asked alone. Ratings are Elo as Chatbot Arena began with it, and as
it computes it now. With E_ij = 1 / (1 + 10^((R_j − R_i) / 400)), a game of i against j that scores
s for i:

- *online*: R_i ← R_i + 4 (s − E_ij), and R_j as much less, from 1,000 each, game after game. The
  order of games matters, so that it is the mean over shuffled resamples of prompts.
- *Bradley–Terry*: the R of mean 1,000 that maximise Σ s log E_ij + (1 − s) log E_ji over all games,
  a tie being half a win each; a logistic regression, in which order plays no part.

Chiang et al. 2024; games of a prompt are resampled together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from prismlm import fingerprints
from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt, Writer, Writing, bleu_figures
from prismlm.eval.judging.judges import (
    Judge,
    Judged,
    Pair,
    examination_pairs,
    examine,
    order_figures,
)
from prismlm.files import keep_json
from prismlm.outputs import write_table
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, begin, keeping, writing
from prismlm.statistics import Interval, bootstrap

START, STEP, SCALE = 1000.0, 4.0, 400 / np.log(10)
ROUNDS = 1000
# Who never loses has no largest likelihood: ratings end so far from their mean.
MOST = 2000.0
NEWTON_STEPS, FARTHEST = 200, 1.0


class Rating(NamedTuple):
    """A model's ratings with their 95 % intervals."""

    elo: Interval
    bradley_terry: Interval


def pairs_of(players: int) -> list[tuple[int, int]]:
    """Return the pairs that games are of, in the order of their columns."""
    return list(combinations(range(players), 2))


def online_elo(
    first: np.ndarray, second: np.ndarray, score: np.ndarray, players: int
) -> np.ndarray:
    """Return the ratings [rounds, players] after games in order.

    Args:
        first, second: players of each game, [rounds, games].
        score: of the first: 1, 0, or between; NaN: there was no game.
        players: how many there are.
    """
    ratings, rows = np.full((len(first), players), START), np.arange(len(first))
    for one, other, own in zip(first.T, second.T, score.T, strict=True):
        gap = (ratings[rows, other] - ratings[rows, one]) / SCALE
        gain = np.nan_to_num(STEP * (own - 1 / (1 + np.exp(gap))))
        ratings[rows, one] += gain
        ratings[rows, other] -= gain
    return ratings


def bradley_terry(wins: np.ndarray) -> np.ndarray:
    """Return the ratings [..., players] of most likelihood, by Newton's method.

    Args:
        wins: [..., players, players], what i scored against j in all.
    """
    games = wins + wins.swapaxes(-1, -2)
    players = wins.shape[-1]
    strength = np.zeros(wins.shape[:-1])
    for _ in range(NEWTON_STEPS):
        expected = 1 / (1 + np.exp(strength[..., None, :] - strength[..., :, None]))
        slope = (wins - games * expected).sum(-1)
        bend = games * expected * (1 - expected)
        # Ones fix the mean, and a trace of the diagonal those who never met.
        curve = np.eye(players) * (bend.sum(-1)[..., None] + 1e-9) - bend + 1
        step = np.linalg.solve(curve, slope[..., None])[..., 0].clip(-FARTHEST, FARTHEST)
        strength = (strength + step).clip(-MOST / SCALE, MOST / SCALE)
        strength -= strength.mean(-1, keepdims=True)
        if np.abs(step).max() < 1e-10:
            break
    return START + SCALE * strength


def wins_of(scores: np.ndarray, players: int) -> np.ndarray:
    """Return what each scored against each, [..., players, players].

    Args:
        scores: [..., prompts, pairs], of the first of each pair; NaN: there was no game.
        players: how many there are.
    """
    wins = np.zeros((*scores.shape[:-2], players, players))
    for column, (i, j) in enumerate(pairs_of(players)):
        wins[..., i, j] = np.nansum(scores[..., column], -1)
        wins[..., j, i] = np.nansum(1 - scores[..., column], -1)
    return wins


def rate(scores: np.ndarray, players: int, seed: int = 0) -> list[Rating]:
    """Return the ratings of all players.

    Args:
        scores: [prompts, pairs], of the first of each of :func:`pairs_of`; NaN: no game.
        players: two or more.
        seed: of the resamples.
    """
    generator, pairs = np.random.default_rng(seed), np.array(pairs_of(players))
    drawn = generator.integers(len(scores), size=(ROUNDS, len(scores)))
    places = np.broadcast_to(np.arange(scores.size), (ROUNDS, scores.size))
    order = generator.permuted(places, axis=1)
    resampled = scores[drawn]
    shuffled = np.take_along_axis(resampled.reshape(ROUNDS, -1), order, 1)
    met = pairs[order % len(pairs)]
    online = online_elo(met[..., 0], met[..., 1], shuffled, players)
    fitted = bradley_terry(wins_of(resampled, players))
    whole = bradley_terry(wins_of(scores, players))
    ends = [np.percentile(found, (2.5, 97.5), axis=0).T for found in (online, fitted)]
    return [
        Rating(
            Interval(float(online[:, i].mean()), *ends[0][i].tolist()),
            Interval(float(whole[i]), *ends[1][i].tolist()),
        )
        for i in range(players)
    ]


FORMAT_VERSION = 1
RESULT_FILE = "judge.json"
CONTINUATIONS, VERDICTS = "continuations.jsonl", "verdicts.jsonl"
CONTINUATIONS_TABLE, VERDICTS_TABLE = "continuations.parquet", "verdicts.parquet"
PACKAGES = ("prismlm", "torch", "transformers", "tokenizers", "sacrebleu")
Announce = Callable[[str, int, int], object]


@dataclass(frozen=True)
class Study:
    """What is judged.

    Attributes:
        models: their directories, by the name that tells them apart.
        prompts: that all of them continue.
        how: they do.
        out: the directory that everything is kept in.
        judge: opens the judge, given the file of its verdicts; None for BLEU alone.
    """

    models: Mapping[str, Path]
    prompts: Sequence[Prompt]
    how: Writing
    out: Path
    judge: Callable[[Path], Judge] | None = None


def named(models: Sequence[Path]) -> dict[str, Path]:
    """Return directories by name, or by path where names are alike."""
    places = [path.resolve() for path in models]
    twice = [str(path) for path in places if places.count(path) > 1]
    if twice:
        raise InputError(f"{twice[0]} is given twice: give each model once.")
    for path in models:
        if not path.is_dir():
            raise InputError(f"there is no model directory {path}.")
    # As they are called here, links too.
    names = [os.path.basename(os.path.abspath(path)) for path in models]
    keys = [n if names.count(n) == 1 else str(p) for n, p in zip(names, models, strict=True)]
    return dict(zip(keys, models, strict=True))


def run_judging(
    study: Study, progress: Reporter = SILENT, announce: Announce = lambda what, asked, tokens: None
) -> dict[str, Any]:
    """Make what is not kept yet, write the tables and ``judge.json``, and return what it holds.

    Args:
        study: what is judged.
        progress: shows the steps.
        announce: is told before a judge is asked: about what, how many questions, tokens in all.

    Raises:
        InputError: other prompts than ``out`` was begun with, a model or a judge that cannot be
            used, or another process that writes there.
        Interrupted: Ctrl-C; what was made is kept.
    """
    prompts = fingerprints.of_json([asdict(one) for one in study.prompts])
    run = {"format_version": FORMAT_VERSION, "prompts": prompts, **asdict(study.how)}
    with writing(study.out / RESULT_FILE):
        begin(study.out, run, made=_begun(study))
        try:
            with keeping(lambda: f"Continuations and verdicts so far are kept in {study.out}."):
                result = _run(study, progress, announce)
        finally:
            # What ended before its first answer binds nobody, and leaves nothing behind.
            if not _begun(study):
                (study.out / RUN_FILE).unlink()
        keep_json(study.out / RESULT_FILE, result)
    return result


def _begun(study: Study) -> bool:
    return any(study.out.glob("*.jsonl"))


def _run(study: Study, progress: Reporter, announce: Announce) -> dict[str, Any]:
    prompts, seed, out = study.prompts, study.how.seed, study.out
    judge = None if study.judge is None else study.judge(out / VERDICTS)
    examined = ratings = None
    if judge is not None:
        asked = [one for some in examination_pairs(prompts, seed).values() for one in some]
        announce("the judge's examination", *judge.left(asked))
        examined = {"source": judge.source, **examine(judge, prompts, seed, progress)}
    texts: dict[str, list[str]] = {}
    for name, directory in study.models.items():
        writer = Writer(name, directory, study.how, out / CONTINUATIONS)
        texts[name] = writer.texts(prompts, progress)
    if texts:
        rows = [
            {"model": name, **asdict(prompt), "continuation": text}
            for name, written in texts.items()
            for prompt, text in zip(prompts, written, strict=True)
        ]
        write_table(out / CONTINUATIONS_TABLE, pa.Table.from_pylist(rows))
    if judge is not None and examined is not None:
        if len(texts) > 1:
            judged = _judged(judge, prompts, texts, progress, announce)
            write_table(out / VERDICTS_TABLE, _verdicts(prompts, list(texts), judged))
            ratings = _ratings(judged, list(texts), len(prompts), seed)
            ratings = {"readable": examined["usable"], **ratings}
        examined["asked"] = judge.asked()
    return {
        "format_version": FORMAT_VERSION,
        "models": list(texts),
        "prompts": len(prompts),
        "settings": asdict(study.how),
        "bleu": bleu_figures(prompts, texts, seed),
        "judge": examined,
        "ratings": ratings,
        "versions": {package: version(package) for package in PACKAGES},
    }


def _judged(
    judge: Judge,
    prompts: Sequence[Prompt],
    texts: Mapping[str, list[str]],
    progress: Reporter,
    announce: Announce,
) -> list[Judged]:
    """Return the verdicts of each two models, prompt by prompt."""
    pairs = [
        Pair(prompt.text, *both)
        for prompt, *written in zip(prompts, *texts.values(), strict=True)
        for both in combinations(written, 2)
    ]
    announce("models", *judge.left(pairs))
    return judge.judge(pairs, "models", progress)


def _ratings(
    judged: Sequence[Judged], models: Sequence[str], prompts: int, seed: int
) -> dict[str, Any]:
    """Return ratings of the models and figures of their pairs; verdicts prompt by prompt."""
    given = [np.nan if one.score is None else one.score for one in judged]
    scores = np.array(given).reshape(prompts, -1)
    pairs: list[dict[str, Any]] = []
    for (first, second), column in zip(combinations(models, 2), scores.T, strict=True):
        own = column[~np.isnan(column)]
        mean = bootstrap(own, seed=seed) if len(own) else Interval(np.nan, np.nan, np.nan)
        count = {"won": int((own > 0.5).sum()), "lost": int((own < 0.5).sum())}
        pair = {"first": first, "second": second, "games": len(own)}
        pairs.append(pair | count | {"score": asdict(mean)})
    rated = [
        {"model": name, **{kind: asdict(one) for kind, one in rating._asdict().items()}}
        for name, rating in zip(models, rate(scores, len(models), seed), strict=True)
    ]
    return {"models": rated, "pairs": pairs, "order": order_figures(judged)}


def _verdicts(
    prompts: Sequence[Prompt], models: Sequence[str], judged: Sequence[Judged]
) -> pa.Table:
    games = [(prompt.id, *pair) for prompt in prompts for pair in combinations(models, 2)]
    rows = [(*game, *one, one.score) for game, one in zip(games, judged, strict=True)]
    names = ("id", "a", "b", "verdict_ab", "verdict_ba", "score_a")
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows])
