"""Answers over seeds: Student's interval, by tables and by hand, and what noise is answered."""

import random

import pytest

from benchmarks.shared.over_seeds import Claim, answers, interval, lines_of


def test_the_interval_by_hand():
    # Mean 2, deviation 1, over three: 2 ± 4.3027 / √3.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    # At a level of 0.01: 2 ± 9.9248 / √3, and of two ± 63.657 · 0.7071 / √2.
    assert interval([1.0, 2.0, 3.0], 0.01) == pytest.approx((2 - 5.73009, 2 + 5.73009), abs=1e-4)
    assert interval([1.0, 2.0], 0.01) == pytest.approx((1.5 - 31.8284, 1.5 + 31.8284), abs=1e-3)


def seeds(*values):
    return dict(enumerate(values))


def test_a_sign_in_every_seed_is_no_answer_by_itself():
    (answer,) = answers([Claim("a than b", seeds(1.0, 2.0, 3.0), seeds(1.5, 2.25, 4.0))])
    assert answer.line.startswith(
        "- a than b: so in all 3 seeds, not significant (difference by seed -0.5000, -0"
    )
    assert (answer.sign, "**" in answer.line) == (0, False)
    (answer,) = answers([Claim("b than a", seeds(1.5, 2.25, 4.0), seeds(1.0, 2.0, 3.0))])
    assert answer.line.startswith("- b than a: the opposite in all 3 seeds, not significant (")
    small = Claim("a", seeds(1.0, 2.0, 3.0), seeds(1.5, 2.51, 3.49))
    (answer,) = answers([small])
    assert answer.line.startswith("- a: **yes, in every seed** (")
    assert answer.sign == -1
    (answer,) = answers([Claim("a", small.others, small.ours)])
    assert "**no: the opposite, in every seed**" in answer.line
    # The seeds that one side alone has do not count, and one is never enough.
    (answer,) = answers([Claim("a", {0: 1.0, 5: 2.0}, {0: 3.0, 7: 4.0})])
    assert answer.line == "- a: not shown (difference -2.0000, 1 seed)."
    assert "not measured" in lines_of([Claim("a", {0: 1.0}, {1: 1.0})])[0]


def test_the_interval_is_corrected_for_the_lines_of_the_section():
    # t = 8.66 on two degrees: past 4.30, and short of the 14.09 of ten lines.
    one = Claim("a", seeds(0.0, 0.0, 0.0), seeds(0.4, 0.5, 0.6))
    assert "**yes, in every seed**" in lines_of([one])[0]
    several = lines_of([one] * 10)
    assert "so in all 3 seeds, not significant" in several[0]
    assert "corrected for 10 lines" in several[0]
    # Lines of one seed test nothing.
    single = Claim("b", {0: 0.0}, {0: 1.0})
    assert "**yes, in every seed**" in lines_of([one, *[single] * 9])[0]


def test_noise_seldom_gets_an_answer():
    drawn = random.Random(0)
    bold = 0
    for _ in range(2000):
        claim = Claim("a", seeds(*(drawn.gauss(0, 1) for _ in range(3))), seeds(0.0, 0.0, 0.0))
        bold += "**" in lines_of([claim])[0]
    # 5 %, and not the 25 % of signs alike; three standard deviations are 1.5 %.
    assert 0.035 < bold / 2000 < 0.065
