from __future__ import annotations

import pytest

from prismlm.cli.format import amount, count, duration, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (9999, "9,999"),
        (12_345, "12.3 k"),
        (999_600, "1.00 M"),
        (4.2e9, "4.20 G"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (99_960, "100 kB"), (2e12, "2.00 TB")],
)
def test_sizes(value: float, text: str) -> None:
    assert size(value) == text


def test_amounts_and_durations() -> None:
    assert amount(1500, "bytes") == "1.50 kB"
    assert amount(1500, "tokens") == "1,500 tokens"
    assert [duration(s) for s in (0.2, 59.6, 3599, 3661)] == [
        "0 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 1 min",
    ]
