"""The next token of positions in the cells of a lens."""

import numpy as np


def next_tokens(cells, rows):
    """Return the token that came next at some rows of the cells, int64 [n]."""
    keys, starts = cells.keys_and_starts
    return keys[np.searchsorted(starts, rows, side="right") - 1] % cells.meta.vocabulary
