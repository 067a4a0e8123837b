"""Lists of results as tables of notebooks, pandas, Parquet and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from prismlm.direction_marks import marks_shown
from prismlm.outputs import write_table

if TYPE_CHECKING:
    import pandas

SHOWN = 50

T = TypeVar("T")


class Rows(list[T]):
    """A list whose items have ``to_dict()``, shown as a table in notebooks that have pandas."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per item; see :func:`frame`."""
        items: list[Any] = list(self)
        return frame(item.to_dict() for item in items)

    def _repr_html_(self) -> str | None:
        return html_table(Rows(self[:SHOWN]))


def frame(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a data frame of rows, by pandas, which has to be installed."""
    import pandas

    return pandas.DataFrame(list(rows))


def html_table(rows: Any) -> str | None:
    """Return what has ``to_pandas()`` as an HTML table, with all values escaped; or None."""
    if find_spec("pandas") is None:
        return None
    table = rows.to_pandas().dropna(axis="columns", how="all")
    return marks_shown(table.to_html(index=False, na_rep="", float_format="{:.3g}".format))


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path | str) -> None:
    """Write rows as Parquet."""
    write_table(path, pa.Table.from_pylist(list(rows)))
