"""Files of a lens: written by one process, read as a whole, changed, or named by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.explain.language_model import PrismLM
from prismlm.files import read_json, write_json
from prismlm.lens import layout
from prismlm.lens.cell_files import CellFiles
from prismlm.lens.labels.write import write_columns
from prismlm.lens.suffixes import count_parts, finish, write_part


def write_cells(directory, runs, meta):
    """Write all ranges of cells, and return their entry in ``meta.json``."""
    cells = CellFiles(meta, runs)
    for number in range(len(cells.ranges)):
        cells.write(directory, number)
    return cells.entry()


def write_suffixes(directory, corpus, split):
    """Write the tokens of a split, and their order if a sorter is installed."""
    for number in reversed(range(count_parts(corpus, split))):
        write_part(directory, corpus, split, number)
    finish(directory, corpus, split)


def cells_and_tokens(cells):
    """Return the cell and the next token of every row of the cells, int64 [rows] each."""
    keys, starts = cells.keys_and_starts
    return np.divmod(np.repeat(keys, np.diff(np.append(starts, len(cells)))), cells.meta.vocabulary)


def next_tokens(cells, rows):
    """Return the token that came next at some rows of the cells, int64 [n]."""
    return cells_and_tokens(cells)[1][rows]


def change_meta(lens: Path, **values: Any) -> None:
    """Change values of ``meta.json``, and note the files as they are now."""
    files = layout.describe_files(lens)
    value = read_json(lens / layout.META_FILE) | {"files": files} | values
    del value["digest"]
    write_json(lens / layout.META_FILE, value | {"digest": fingerprints.of_json(value)})
    table = pq.read_table(lens / layout.PROTOTYPES_FILE)
    layout.write_prototypes(table, lens / layout.PROTOTYPES_FILE, value["files"])


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
