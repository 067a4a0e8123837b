"""Numbers as people read them."""

from __future__ import annotations


def count(value: float) -> str:
    """Return a count that is short where it is large: 950, 9,875, 12.3 k, 4.56 M, 1.20 G."""
    return f"{value:,.0f}" if abs(value) < 9999.5 else _scaled(value, ("", " k", " M", " G", " T"))


def size(value: float) -> str:
    """Return a number of bytes: 950 B, 12.3 kB, 4.56 MB, 1.20 GB."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def amount(value: float, unit: str) -> str:
    """Return an amount of a unit; bytes are scaled as sizes."""
    return size(value) if unit == "bytes" else f"{count(value)} {unit}"


def duration(seconds: float) -> str:
    """Return a time: 4 s, 2 min 5 s, 3 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    step, scaled = 0, float(value)
    while abs(scaled) >= 999.5 and step < len(units) - 1:
        step, scaled = step + 1, scaled / 1000
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits if step else 0}f}{units[step]}"
