"""The cells of a lens, written by one process."""

from prismlm.lens.cell_files import cells_entry, ranges_of, write_range


def write_cells(directory, runs, meta, range_bytes=2**30):
    """Write all ranges of cells, and return their entry in ``meta.json``."""
    ranges = ranges_of(runs, range_bytes)
    for number in range(len(ranges)):
        write_range(directory, runs, ranges, number, meta.vocabulary)
    return cells_entry(meta, runs, ranges)
