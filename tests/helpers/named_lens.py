"""A lens with names, categories and a map made by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import prismlm
from prismlm.explain.language_model import PrismLM
from prismlm.lens.labels.write import write_columns

ACROSS = 16
CATEGORIES = ("Numbers / Time", "Morphology")


def named_model(model: Path, directory: Path, first: str = "word0 → next0") -> PrismLM:
    """Return a copy of a model that is named by hand.

    Args:
        model: with a lens.
        directory: to copy it into.
        first: the name of the first.
    """
    lm = prismlm.load(shutil.copytree(model, directory))
    name_by_hand(lm, first)
    return lm


def name_by_hand(lm: PrismLM, first: str = "word0 → next0") -> None:
    """Put the prototypes of a lens on a grid, sixteen across.

    Their names are ``word1 → next1`` and so on, their categories two in turn.
    """
    assert lm.lens is not None
    count = lm.lens.num_prototypes
    columns: dict[str, Sequence[Any] | np.ndarray] = {
        "x": np.arange(count) % ACROSS,
        "y": np.arange(count) // ACROSS,
        "category": [CATEGORIES[i % 2] for i in range(count)],
        "name": [first, *(f"word{i} → next{i}" for i in range(1, count))],
    }
    write_columns(lm.lens, columns, map={"method": "by hand"})
