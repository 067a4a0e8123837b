"""Lists of results as tables of notebooks, pandas, Parquet and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError
from prismlm.outputs import write_table

if TYPE_CHECKING:
    import pandas

SHOWN = 50
SHARES = ("share", "base_rate", "explained_share", "probability")

T = TypeVar("T")


class Rows(list[T]):
    """A list whose items have ``to_dict()``, shown as a table in notebooks."""

    @property
    def _rows(self) -> list[dict[str, Any]]:
        items: list[Any] = list(self)
        return [item.to_dict() for item in items]

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per item; see :func:`frame`."""
        return frame(self._rows)

    def _repr_html_(self) -> str:
        return table(Rows(self[:SHOWN])._rows)


def frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a data frame of rows; InputError if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise InputError("to_pandas needs pandas: install it with pip install pandas.") from error
    return pandas.DataFrame(list(rows))


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path | str) -> None:
    """Write rows as Parquet."""
    write_table(path, pa.Table.from_pylist([dict(row) for row in rows]))


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as an HTML table, with all values escaped."""
    columns = [name for name in (rows[0] if rows else ()) if any(row[name] for row in rows)]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in columns)
    lines = ("<tr>" + "".join(_cell(name, row[name]) for name in columns) + "</tr>" for row in rows)
    body = marks_shown("".join(lines))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        text = f"{value:.1%}" if name in SHARES else f"{value:.3g}"
        return f"<td style='text-align:right'>{text}</td>"
    return f"<td style='text-align:left'>{'' if value is None else escape(str(value))}</td>"
