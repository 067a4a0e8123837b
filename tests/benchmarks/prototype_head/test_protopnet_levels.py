"""When a curve reaches a level, and the ratios of the page on the ProtoPNet-style head."""

import math

import pytest

from benchmarks.prototype_head import protopnet_levels as levels


def curve(*ces, seconds=10.0, tokens=100):
    return [
        {
            "ce": ce,
            "cpu_seconds": seconds * i,
            "wall_seconds": 2 * seconds * i,
            "tokens": tokens * i,
        }
        for i, ce in enumerate(ces)
    ]


def test_between_two_points_along_a_line():
    """5 → 3 over 10 to 20 seconds passes 4.5 a quarter of the way."""
    assert levels.first_reach(curve(8, 5, 3), 4.5, "cpu_seconds") == pytest.approx(12.5)
    assert levels.first_reach(curve(8, 5, 3), 5.0, "tokens") == pytest.approx(100)


def test_the_first_time_counts():
    assert levels.first_reach(curve(6, 4, 5, 4), 4.5, "cpu_seconds") == pytest.approx(7.5)


def test_never():
    assert levels.first_reach(curve(6, 5), 4.9, "tokens") is None


def test_ratios_to_the_references():
    """Steps that take twice as long, and half as many more of them: three times as long."""
    seeds = (0, 1)
    runs = [
        {"variant": name, "seed": seed, "curve": own}
        for seed in seeds
        for name, own in (
            ("prism", curve(8, 5, 2)),
            ("through", curve(8, 5, 2)),
            # Falls 2 a point where the others fall 3.
            ("dense", curve(8, 6, 4, 2 + 0.5 * seed, seconds=20)),
        )
    ]
    found = levels.compare(runs)
    assert found["slowest"] == {"0": "prism", "1": "dense"}
    assert found["slowest_perplexity"]["1"] == pytest.approx(math.exp(2.5))
    names = [row["perplexity"] for row in found["levels"]]
    assert names[0] == "130", "the highest below exp(5), the first evaluation of the fastest"
    assert names[-2:] == ["15", "slowest"]
    ratio = found["levels"][-1]["ratio"]["through"]["dense"]
    # Seed 0, CE 2: 60 s and 300 tokens against 20 s and 200. Seed 1, CE 2.5: 60 s against 55 / 3.
    assert ratio["tokens"]["low"] == pytest.approx(300 / 200)
    assert ratio["cpu_seconds"]["low"] == pytest.approx(3.0)
    assert ratio["cpu_seconds"]["high"] == pytest.approx(60 / (55 / 3))
    assert ratio["cpu_seconds"]["mean"] == pytest.approx((3 * 180 / 55) ** 0.5)


def test_a_level_that_one_seed_misses_has_no_ratio():
    assert levels._ratio([2.0, None], [1.0, 1.0]) is None
    assert levels._ratio([2.0, 8.0], [1.0, 1.0])["mean"] == pytest.approx(4.0)
