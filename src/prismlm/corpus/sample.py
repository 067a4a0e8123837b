"""The bundled sample: a small, openly licensed text collection for demos and tests."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def sample_path() -> Path:
    """Return the Parquet file of the bundled sample; ATTRIBUTION.md beside it credits its sources.

    Columns: id, text, domain, source, license, title, url.
    """
    return Path(str(files("prismlm.corpus"))) / "sample" / "sample.parquet"
