"""Which corpus a model was trained on and in what rows, as its directory says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prismlm.corpus.store import Corpus
from prismlm.errors import InputError
from prismlm.files import read_json
from prismlm.models.sidecar import META_FILE

RUN_FILE = "training.json"
"""What ``prismlm train`` notes of a run, of a model without a head too."""


def training_corpus(directory: Path | str) -> Corpus:
    """Open the corpus that a model directory says it was trained on.

    A relative path in its recipe is relative to the current directory, as it was in training.

    Raises:
        InputError: the directory does not say, the corpus is not there, or another is.
        FormatError: a file is damaged.
    """
    noted = _noted(Path(directory))
    path = (noted.get("recipe") or {}).get("corpus")
    way_out = "Name the corpus with --corpus DIR."
    if not isinstance(path, str):
        raise InputError(f"{directory} does not say which corpus it was trained on. {way_out}")
    if not Path(path).is_dir():
        raise InputError(f"{directory} was trained on {path}, which is not there. {way_out}")
    found = Corpus.open(path)
    fingerprint = (noted.get("corpus") or {}).get("fingerprint")
    if fingerprint not in (None, found.fingerprint):
        raise InputError(
            f"the corpus {path} is not the one that {directory} was trained on: it was built anew "
            f"or has another name now. {way_out}"
        )
    return found


def trained_length(directory: Path | str) -> int | None:
    """Return how many tokens a training row had, or None if the model directory does not say."""
    data = (_noted(Path(directory)).get("recipe") or {}).get("data") or {}
    length = data.get("length")
    return length if isinstance(length, int) and length > 0 else None


def _noted(directory: Path) -> dict[str, Any]:
    for name in (META_FILE, RUN_FILE):
        if (directory / name).is_file():
            value = read_json(directory / name)
            noted = value.get("provenance") if name == META_FILE else value
            if isinstance(noted, dict) and "recipe" in noted:
                return noted
    return {}
