"""Ratings from games: Elo as Chatbot Arena began with it, and as it computes it now.

With E_ij = 1 / (1 + 10^((R_j − R_i) / 400)), a game of i against j that scores s for i:

- *online*: R_i ← R_i + 4 (s − E_ij), and R_j as much less, from 1,000 each, game after game. The
  order of games matters, so that it is the mean over shuffled resamples of prompts.
- *Bradley–Terry*: the R of mean 1,000 that maximise Σ s log E_ij + (1 − s) log E_ji over all games,
  a tie being half a win each; a logistic regression, in which order plays no part.

Chiang et al. 2024; games of a prompt are resampled together.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from prismlm.statistics import Interval

START, STEP, SCALE = 1000.0, 4.0, 400 / np.log(10)
ROUNDS = 1000
# Who never loses has no largest likelihood: ratings end so far from their mean.
MAX_DISTANCE = 2000.0
NEWTON_STEPS, MAX_NEWTON_STEP = 200, 1.0


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
    strength = np.zeros(wins.shape[:-1])
    for _ in range(NEWTON_STEPS):
        expected = 1 / (1 + np.exp(strength[..., None, :] - strength[..., :, None]))
        gradient = (wins - games * expected).sum(-1)
        variance = games * expected * (1 - expected)
        # Ones fix the mean, and a trace of the diagonal those who never met.
        hessian = np.eye(wins.shape[-1]) * (variance.sum(-1)[..., None] + 1e-9) - variance + 1
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        step = step.clip(-MAX_NEWTON_STEP, MAX_NEWTON_STEP)
        strength = (strength + step).clip(-MAX_DISTANCE / SCALE, MAX_DISTANCE / SCALE)
        strength -= strength.mean(-1, keepdims=True)
        if np.abs(step).max() < 1e-10:
            break
    return START + SCALE * strength


def wins_of(scores: np.ndarray, players: int) -> np.ndarray:
    """Return what each scored against each, [..., players, players].

    Args:
        scores: [..., prompts, pairs], of the first of each two; NaN: there was no game.
        players: how many there are.
    """
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
    met = pairs[order % len(pairs)]
    online = online_elo(met[..., 0], met[..., 1], shuffled, players)
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
