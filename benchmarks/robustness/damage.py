"""Files damaged at random: bytes turned, cut and moved, and JSON with values of other kinds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ODD_JSON: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 1e308, "x", "", [], {}, [[]], {"a": None}, 2**70, "\ud800",
)  # fmt: skip
WAYS = ("flip", "cut", "insert", "drop", "zero", "repeat", "empty")


@dataclass(frozen=True)
class Damage:
    """What is done to a file.

    Attributes:
        file: below the tree that is copied.
        way: one of WAYS, or "json".
        at: where, as a share of the file or of the values of its JSON.
        size: how many bytes.
        value: what a value of its JSON becomes; "(gone)" takes it out.
    """

    file: str
    way: str
    at: float
    size: int
    value: Any = None

    def apply(self, path: Path) -> None:
        """Damage a file that no other name leads to."""
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(self._json(data) if self.way == "json" else self._bytes(data))

    def _bytes(self, data: bytes) -> bytes:
        at = int(self.at * len(data))
        end = at + self.size
        return {
            "flip": data[:at] + bytes([data[at] ^ (1 << self.size % 8)]) + data[at + 1 :]
            if at < len(data)
            else data,
            "cut": data[:at],
            "insert": data[:at] + os.urandom(0) + bytes(range(self.size % 256)) + data[at:],
            "drop": data[:at] + data[end:],
            "zero": data[:at] + bytes(len(data[at:end])) + data[end:],
            "repeat": data[:end] + data[at:],
            "empty": b"",
        }[self.way]

    def _json(self, data: bytes) -> bytes:
        value = json.loads(data)
        places = list(_places(value))
        holder, key = places[int(self.at * len(places)) % len(places)]
        if self.value == "(gone)":
            del holder[key]
        else:
            holder[key] = self.value
        return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    # Long lists, such as a vocabulary, are looked into at their start alone.
    keys = list(value)[:40] if isinstance(value, dict) else range(min(len(value), 5))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def damages(files: list[str]) -> st.SearchStrategy[Damage]:
    """Draw damage to one of some files."""

    def of(file: str) -> st.SearchStrategy[Damage]:
        at, size = st.floats(0, 1, exclude_max=True), st.integers(1, 200)
        turned = st.builds(Damage, st.just(file), st.sampled_from(WAYS), at, size)
        if not file.endswith(".json"):
            return turned
        odd = st.sampled_from((*ODD_JSON, "(gone)", "(gone)"))
        return st.builds(Damage, st.just(file), st.just("json"), at, size, odd) | turned

    return st.sampled_from(files).flatmap(of)


def copy_damaged(tree: Path, to: Path, damage: Damage) -> None:
    """Copy a directory by links, and damage one file of the copy."""
    shutil.copytree(tree, to, copy_function=os.link)
    damage.apply(to / damage.file)
