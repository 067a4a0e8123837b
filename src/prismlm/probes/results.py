"""The result of every probe: a table of figures beside their controls, printed or as JSON.

What a figure means is documented with the probe, not in the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Any

from prismlm.files import finite

if TYPE_CHECKING:
    from prismlm.statistics import Interval

Row = dict[str, Any]
BLOCKS = " ▁▂▃▄▅▆▇█"
FINDINGS = "finding value:+.4f control:+.4f effect"


@dataclass(frozen=True)
class Table:
    """Figures under named columns, one row per thing that was measured."""

    title: str
    columns: str | Mapping[str, str]  # the printed ones: ``name`` or ``name:format``, by blanks
    rows: tuple[Row, ...]  # may have more figures than are printed
    facts: Row = field(default_factory=dict[str, Any])  # figures of the whole table
    findings: tuple[Row, ...] = ()  # its conclusions, by :func:`finding`

    def __getitem__(self, name: str) -> Any:
        """Return a fact."""
        return self.facts[name]

    @property
    def formats(self) -> Mapping[str, str]:
        """The number format of each printed column, by name."""
        if not isinstance(self.columns, str):
            return self.columns
        return {name: form for name, _, form in (c.partition(":") for c in self.columns.split())}

    def to_dict(self) -> Row:
        """Return JSON values: the facts, and ``rows``; non-finite numbers become None."""
        return as_json(self.facts | {"rows": self.rows})


@dataclass(frozen=True)
class Report:
    """Tables of one model over one text."""

    model: str
    facts: Row  # what was read, and how
    tables: Mapping[str, Table]
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])  # tables, with the reason

    def __getitem__(self, name: str) -> Table:
        """Return a table."""
        return self.tables[name]

    @property
    def findings(self) -> tuple[Row, ...]:
        """The findings of all tables."""
        return tuple(row for table in self.tables.values() for row in table.findings)

    def to_dict(self) -> Row:
        """Return JSON values; a table that was left out is None."""
        tables = {name: table.to_dict() for name, table in self.tables.items()}
        value = {"model": self.model} | self.facts | dict.fromkeys(self.left_out) | tables
        return as_json(value | {"findings": self.findings, "left_out": self.left_out})


def finding(name: str, value: Interval | None, control: Any = None, *, clear: bool = True) -> Row:
    """Return a row of :data:`FINDINGS`: the difference ``name``, its control, and its effect.

    ``clear`` says whether every other condition of the check holds.
    """
    effect = "may be chance"
    if value is None or math.isnan(value.value):
        effect = "undefined"
    elif clear and (value.above_zero or value.below_zero):
        effect = "above 0" if value.above_zero else "below 0"
    return {"finding": name, "value": value, "control": control, "effect": effect}


def as_json(value: Any) -> Any:
    """Return JSON values of dataclasses, mappings and sequences; non-finite becomes None."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return finite(getattr(value, "tolist", lambda: value)())


def figure_at(row: Row, name: str) -> Any:
    """Return a figure of a row; ``after.whole`` is nested, as ``gain.value`` may be."""
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def text_of(value: Any, form: str = "") -> str:
    """Return a figure as text: an interval as ``+0.01 [−0.02, +0.04]``, a missing one as a dash.

    A list of numbers becomes a bar chart of blocks.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, (list, tuple)):
        top = max(map(float, value), default=0.0)
        return "".join(BLOCKS[round(8 * max(0.0, x) / top) if top > 0 else 0] for x in value)
    # Commands import this module before SciPy.
    from prismlm.statistics import Interval

    if isinstance(value, Interval):
        middle, low, high = (text_of(x, form) for x in (value.value, value.low, value.high))
        return f"{middle} [{low}, {high}]"
    return value if isinstance(value, str) else format(value, form).replace("-", "−")
