"""Paired differences over seeds: Student's interval by hand, its correction, and noise."""

import pytest

from benchmarks.shared.over_seeds import differences, interval


def test_the_interval_by_hand():
    # Mean 2, deviation 1, over three: 2 ± 4.3027 / √3.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    # At a level of 0.01: 2 ± 9.9248 / √3, and of two ± 63.657 · 0.7071 / √2.
    assert interval([1.0, 2.0, 3.0], 0.01) == pytest.approx((2 - 5.73009, 2 + 5.73009), abs=1e-4)
    assert interval([1.0, 2.0], 0.01) == pytest.approx((1.5 - 31.8284, 1.5 + 31.8284), abs=1e-3)


def seeds(*values):
    return dict(enumerate(values))


def test_a_sign_in_every_seed_is_not_enough():
    (found,) = differences([(seeds(1.0, 2.0, 3.0), seeds(1.5, 2.25, 4.0))])
    assert (found.sign, "**" in found.shown()) == (0, False)
    below, above = seeds(1.0, 2.0, 3.0), seeds(1.5, 2.51, 3.49)
    (found,) = differences([(below, above)])
    assert found.sign == -1
    assert found.shown("+.1f") == "**-0.5 (-0.5 to -0.5)**"
    assert differences([(above, below)])[0].sign == 1
    # The seeds that one side alone has do not count, and one is never enough.
    (found,) = differences([({0: 1.0, 5: 2.0}, {0: 3.0, 7: 4.0})])
    assert (found.sign, found.shown()) == (0, "-2.0000 (1 seed)")


def test_the_interval_is_corrected_for_the_rows_of_the_table():
    # t = 8.66 on two degrees: past 4.30, and short of the 14.09 of ten rows.
    one = seeds(0.0, 0.0, 0.0), seeds(0.4, 0.5, 0.6)
    assert differences([one])[0].sign == -1
    assert differences([one] * 10)[0].sign == 0
    # Rows of one seed test nothing.
    assert differences([one, *[({0: 0.0}, {0: 1.0})] * 9])[0].sign == -1
