"""Product quantisation against a loop over centres, and lenses that are coded so."""

import sys

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.lens.cells import Cells
from prismlm.lens.codes import PARTS, ProductCodes, check_codes, parts_of
from tests.lens.test_cells import random_records, write


def unit_states(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(count, width, generator=generator)).numpy()


@pytest.mark.parametrize(
    ("name", "width"), [("pq", 4), ("pq", 8), ("pq", 10), ("pq12", 24), ("pq12", 30)]
)
def test_a_state_is_the_nearest_centre_of_each_part(name, width):
    size = PARTS[name]
    states = unit_states(300, width)
    coded = ProductCodes.learn(states, name)
    given = np.empty(40, [("scale", "<f2"), ("code", "i1", (width,))])
    given["code"] = np.rint(127 * states[:40])
    given["scale"] = 1
    into = np.empty(40, np.dtype(coded.fields))
    coded.put(given, into)
    filled = np.zeros((40, size * parts_of(width, name)))
    filled[:, :width] = np.rint(127 * states[:40]) / 127
    for state, code in zip(filled, into["code"], strict=True):
        for part, centres in enumerate(coded.centres):
            distances = ((centres - state[size * part : size * part + size]) ** 2).sum(1)
            assert distances[code[part]] == pytest.approx(distances.min(), abs=1e-6)
    by_hand = np.stack(
        [np.concatenate([coded.centres[p, c] for p, c in enumerate(row)]) for row in into["code"]]
    )[:, :width]
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    np.testing.assert_allclose(coded.states(into), by_hand, atol=1e-6)
    owner = np.repeat([1, 2, 4], [10, 25, 5])
    found = coded.cosines(into, torch.from_numpy(states[:6]), owner)
    np.testing.assert_allclose(found, (by_hand * states[owner]).sum(1), atol=1e-6)


def test_codes_take_a_quarter_and_are_near(tmp_path):
    records = random_records(3000)
    meta = write(tmp_path / "lens", records, [1000], codes="pq", tokens=10**6)
    cells = Cells(tmp_path / "lens", meta)
    exact = Cells(tmp_path / "int8", write(tmp_path / "int8", records, [1000]))
    assert cells.records(np.arange(3)).itemsize == 4 + 2 + 2 + 1
    rows = np.arange(len(cells))
    states, expected = (c.codes.states(c.records(rows)) for c in (cells, exact))
    # 256 centres for directions in four dimensions
    assert (states * expected).sum(1).mean() > 0.97
    np.testing.assert_array_equal(cells.positions(0, 9), exact.positions(0, 9))


def test_few_positions_or_none(tmp_path):
    for count in (0, 3):
        meta = write(tmp_path / f"{count}", random_records(count), [], codes="pq")
        cells = Cells(tmp_path / f"{count}", meta)
        found = cells.codes.states(cells.records(np.arange(count)))
        assert found.shape == (count, 4)
        assert torch.isfinite(found).all()


def test_a_missing_library_is_refused(monkeypatch):
    assert check_codes("int8") == "int8"
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"prismlm\[pq\]"):
        check_codes("pq")
