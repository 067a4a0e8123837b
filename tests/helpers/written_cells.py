"""The cells of a lens, written by one process."""

from prismlm.lens.cell_files import CellFiles


def write_cells(directory, runs, meta, range_bytes=2**30):
    """Write all ranges of cells, and return their entry in ``meta.json``."""
    cells = CellFiles(meta, runs, range_bytes)
    for number in range(len(cells.ranges)):
        cells.write(directory, number)
    return cells.entry()
