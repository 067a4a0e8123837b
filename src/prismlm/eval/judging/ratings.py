"""Ratings from games between models: Elo as Chatbot Arena began with it, and as it computes it now.

With E_ij = 1 / (1 + 10^((R_j − R_i) / 400)), a game of i against j that scores s for i:

- *online*: R_i ← R_i + 4 (s − E_ij), and R_j as much less, from 1,000 each, game after game. The
  order of games matters, so that it is the mean over shuffled resamples of prompts.
- *Bradley–Terry*: the R of mean 1,000 that maximise Σ s log E_ij + (1 − s) log E_ji over all games,
  a tie being half a win each; a logistic regression, in which order plays no part.

Chiang et al. 2024; games of a prompt are resampled together.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np

from prismlm.statistics import Interval

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
