"""What a spool holds of the records that are given to it."""

import numpy as np

from prismlm.index import sort_cells
from prismlm.index.sort_cells import Spool, in_order
from tests.index.test_cells import WIDTH, random_records


def test_records_are_written_as_sorted_runs_when_there_are_many(tmp_path, monkeypatch):
    records = random_records(30)
    monkeypatch.setattr(sort_cells, "SORT_BYTES", 12 * records.itemsize)
    spool = Spool(tmp_path / "spool", WIDTH)
    for part in np.split(records, 6):
        spool.add(part)
    assert spool.runs == [15, 15]
    again = Spool(tmp_path / "spool", WIDTH, spool.runs)
    for run, expected in zip(again.opened(), np.split(records, 2), strict=True):
        np.testing.assert_array_equal(run, in_order(expected))


def test_a_flush_of_nothing_writes_nothing(tmp_path):
    spool = Spool(tmp_path / "spool", WIDTH)
    spool.flush()
    assert spool.runs == spool.opened() == []
    assert not spool.path.exists()
