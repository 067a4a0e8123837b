"""A lens with names, categories and a map made by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import prismlm
from prismlm.explain.language_model import PrismLM
from prismlm.index import layout

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
    table = lm.lens.prototypes
    for name, values in columns.items():
        column = layout.PROTOTYPES_SCHEMA.get_field_index(name)
        field = layout.PROTOTYPES_SCHEMA.field(column)
        table = table.set_column(column, field, pa.array(values, field.type))
    layout.write_table(table, lm.lens.path / layout.PROTOTYPES_FILE)
    layout.write_meta(lm.lens.path, replace(lm.lens.meta, map={"method": "by hand"}))
    lm.lens.read_labels_again()
