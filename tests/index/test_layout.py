"""Arrays of a lens that are damaged are refused, whatever of them it is."""

import numpy as np
import pytest

from prismlm.errors import FormatError
from prismlm.index.layout import open_array

HEADER = 128


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "array.npy"
    np.save(path, np.arange(7, dtype=np.uint32))
    assert len(path.read_bytes()) == HEADER + 28
    return path


@pytest.mark.parametrize("length", [0, 5, 60, HEADER + 27])
def test_a_file_that_is_cut_off(stored, tmp_path, length):
    path = tmp_path / "array.npy"
    path.write_bytes(stored.read_bytes()[:length])
    with pytest.raises(FormatError, match="is damaged"):
        open_array(path)
