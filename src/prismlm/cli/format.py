"""Numbers as people read them."""

from __future__ import annotations


def count(value: float) -> str:
    """Return a count that is short where it is large: 950, 9,875, 12.3 k, 4.56 M, 1.20 G."""
    if abs(value) < 9999.5:
        return f"{value:,.0f}"
    return _scaled(value, ["", " k", " M", " G", " T"])


def size(value: float) -> str:
    """Return a number of bytes: 950 B, 12.3 kB, 4.56 MB, 1.20 GB."""
    return _scaled(value, [" B", " kB", " MB", " GB", " TB"])


def amount(value: float, unit: str) -> str:
    """Return an amount of a unit; bytes are scaled as sizes."""
    return size(value) if unit == "bytes" else f"{count(value)} {unit}"


def points(difference: float) -> str:
    """Return a difference of two shares in percentage points: +1.2 points."""
    return f"{100 * difference:+.1f} points"


def duration(seconds: float) -> str:
    """Return a time: 4 s, 2 min 5 s, 3 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _scaled(value: float, units: list[str]) -> str:
    scaled = float(value)
    for unit in units[:-1]:
        if abs(scaled) < 999.5:
            return _three_digits(scaled, whole=unit is units[0]) + unit
        scaled /= 1000
    return _three_digits(scaled, whole=False) + units[-1]


def _three_digits(value: float, *, whole: bool) -> str:
    if whole:
        return f"{value:.0f}"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"
