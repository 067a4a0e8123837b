"""Files of a lens that are damaged are refused, whatever of them it is."""

import os
import shutil

import numpy as np
import pytest

from prismlm.errors import FormatError
from prismlm.lens import layout, suffixes
from prismlm.lens.lens import Lens, inspect_lens


def test_maps_of_arrays_hold_no_file_descriptor(tmp_path):
    np.save(tmp_path / "array.npy", table := np.arange(12).reshape(3, 4))
    before = len(os.listdir("/proc/self/fd"))
    array = layout.open_array(tmp_path / "array.npy")
    assert len(os.listdir("/proc/self/fd")) == before
    np.testing.assert_array_equal(array, table)


def test_a_flipped_bit_in_any_file_is_refused(lm, tmp_path, monkeypatch):
    lens = shutil.copytree(lm.lens.path, tmp_path / "lens")

    def read_all():
        opened = Lens.open(lens, lm.model, lm.head)
        _ = opened.index, opened.prototypes, opened.suffixes
        _ = opened.cells.keys_and_starts, opened.cells.documents
        return opened

    read_all()
    names = {path.name for path in lens.iterdir()}
    assert {*layout.CELL_FILES, suffixes.TOKENS_FILE, suffixes.ORDER_FILE, layout.META_FILE} < names

    def assert_refused(name, place, read):
        data = bytearray(original := (lens / name).read_bytes())
        data[place(len(data))] ^= 4
        (lens / name).write_bytes(data)
        with pytest.raises(FormatError, match=name):
            read()
        (lens / name).write_bytes(original)

    for name in names:
        table = name == layout.PROTOTYPES_FILE
        assert_refused(name, lambda size, table=table: 200 if table else size // 2, read_all)
    # Of larger cells and suffix arrays, it is noticed when every file is compared.
    monkeypatch.setattr("prismlm.lens.store.COMPARED_BYTES", 0)
    for name in (layout.CELLS_FILE, suffixes.TOKENS_FILE, suffixes.ORDER_FILE):
        assert_refused(name, lambda size: size - 1, lambda: inspect_lens(read_all()))
