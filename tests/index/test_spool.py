"""What a spool holds after a kill, and what it refuses."""

import numpy as np
import pytest

from prismlm.errors import FormatError
from prismlm.index.spool import Spool, in_order
from tests.index.test_cells import WIDTH, random_records


def test_what_a_kill_left_behind_is_cut_off(tmp_path):
    records = random_records(30)
    spool = Spool(tmp_path / "spool", WIDTH)
    spool.add(records[:10])
    spool.flush()
    known = list(spool.runs)
    spool.add(records[10:20])
    spool.flush()  # nobody was told of this run
    again = Spool(tmp_path / "spool", WIDTH, known)
    again.add(records[20:])
    again.flush()
    assert [run.rows for run in again.runs] == [10, 10]
    np.testing.assert_array_equal(again.read(0, 10), in_order(records[:10]))
    np.testing.assert_array_equal(again.read(10, 10), in_order(records[20:]))
    assert again.counts(5).sum(1).tolist() == [10, 10]


def test_a_flush_of_nothing_writes_nothing(tmp_path):
    spool = Spool(tmp_path / "spool", WIDTH)
    spool.flush()
    assert spool.runs == []
    assert not spool.path.exists()


def test_a_damaged_run_is_refused(tmp_path):
    spool = Spool(tmp_path / "spool", WIDTH)
    spool.add(random_records(30))
    spool.flush()
    data = bytearray(spool.path.read_bytes())
    data[40] ^= 1
    spool.path.write_bytes(data)
    with pytest.raises(FormatError, match="damaged"):
        spool.counts(5)
    spool.path.write_bytes(data[:-1])
    with pytest.raises(FormatError, match="cut off"):
        spool.read(0, 30)
    spool.add(random_records(3))
    with pytest.raises(FormatError, match="shorter"):
        spool.flush()
