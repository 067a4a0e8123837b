"""Ratings of a few games by hand."""

import numpy as np
import pytest

from prismlm.eval.judging.study import MAX_DISTANCE, bradley_terry, online_elo, rate, wins_of


def test_online_elo_of_three_games_by_hand():
    # A wins: expected 1/2, so that it gets 2. Then B wins: expected of A is 1 / (1 + 10^(−4/400)),
    # 0.5057562, which it loses four times. Then a tie: A, a little behind, gains a little.
    score = np.array([[1.0, 0.0, 0.5]])
    first, second = np.zeros((1, 3), int), np.ones((1, 3), int)
    after = [online_elo(first[:, :n], second[:, :n], score[:, :n], 2)[0, 0] for n in (1, 2, 3)]
    assert after[0] == 1002
    assert after[1] == pytest.approx(1002 - 4 * 0.5057562, abs=1e-6)
    assert after[2] == pytest.approx(999.976975 + 4 * (0.5 - 0.4999337), abs=1e-6)
    assert online_elo(first, second, score, 2).sum() == 2000


@pytest.mark.parametrize("scores", [[1, 1, 0], [1, 0.5, 0.5]], ids=["wins", "ties"])
def test_bradley_terry_of_three_games_by_hand(scores):
    # Two of three points are odds of 2 to 1, which 400 log10(2) = 120.412 ratings give.
    wins = wins_of(np.array(scores, float)[:, None], 2)
    assert wins.tolist() == [[0, 2], [1, 0]]
    assert bradley_terry(wins).tolist() == pytest.approx([1060.206, 939.794], abs=1e-3)


def test_strengths_of_four_players_are_found_again():
    points = np.array([800.0, 950.0, 1050.0, 1200.0])
    chance = 1 / (1 + 10 ** ((points[None] - points[:, None]) / 400))
    np.fill_diagonal(chance, 0)
    assert bradley_terry(chance * 7) == pytest.approx(points, abs=1e-6)
    uneven = np.arange(1, 17).reshape(4, 4) * chance
    uneven = uneven + uneven.T * np.where(chance > 0, chance / np.where(chance > 0, chance.T, 1), 0)
    assert bradley_terry(uneven) == pytest.approx(points, abs=1e-6)


def test_who_never_loses_ends_at_the_bound_and_who_never_played_at_the_start():
    best, worst = rate(np.ones((4, 1)), 2)
    assert best["bradley_terry"].value == pytest.approx(1000 + MAX_DISTANCE)
    assert worst["bradley_terry"].value == pytest.approx(1000 - MAX_DISTANCE)
    scores = np.array([[0.5, np.nan, np.nan]] * 3)
    assert [one["bradley_terry"].value for one in rate(scores, 3)] == pytest.approx([1000] * 3)
