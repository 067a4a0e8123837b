"""What a spool holds after a kill, and what it refuses."""

import numpy as np
import pytest

from prismlm.corpus.windows import PASS_TOKENS
from prismlm.errors import FormatError
from prismlm.index.spool import Spool, in_order, record_type
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


def test_positions_wait_in_one_place_though_a_later_pass_is_longer(tmp_path, monkeypatch):
    """Twice until it is full, which the last pass only just does not make it."""
    monkeypatch.setattr("prismlm.index.spool.BUFFER_BYTES", 5000 * record_type(WIDTH).itemsize)
    spool, places = Spool(tmp_path / "spool", WIDTH), set()
    for rows in (1, 4998, PASS_TOKENS, 4999, PASS_TOKENS):
        spool.add(random_records(rows))
        places.add(spool._waiting.ctypes.data)
        if spool.full:
            spool.flush()
    assert len(places) == 1
    assert [run.rows for run in spool.runs] == [1 + 4998 + PASS_TOKENS, 4999 + PASS_TOKENS]
