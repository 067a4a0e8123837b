"""Cells are written from runs in any order, read back, and refused where they were changed."""

import shutil
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from prismlm.errors import InputError
from prismlm.lens import cell_files as module
from prismlm.lens import layout
from prismlm.lens.cell_files import CellFiles, Run, cells_format, spooled_type, write_run
from prismlm.lens.cells import (
    PARTS,
    Cells,
    Int8Codes,
    ProductCodes,
    check_codes,
    learn_codes,
    parts_of,
    record_type,
)
from tests.helpers.lens_files import write_cells

CELLS, VOCABULARY, WIDTH = 5, 7, 4


def random_states(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, width, generator=generator)).numpy()


def random_records(count, seed=0, codes=None):
    """Records as a scan yields them, in the code of ``codes``, by default int8."""
    generator = np.random.default_rng(seed)
    codes = codes or Int8Codes()
    name = "int8" if isinstance(codes, Int8Codes) else "pq"
    cells = cells_format(WIDTH, VOCABULARY, 2**63, name)
    records = np.empty(count, spooled_type(cells))
    records["cell"] = generator.integers(CELLS, size=count)
    records["token"] = generator.integers(VOCABULARY, size=count)
    records["position"] = generator.permutation(10 * count)[:count]
    records["probability"] = generator.random(count)
    records["read"] = generator.integers(VOCABULARY, size=count)
    codes.put(random_states(count, WIDTH, seed), records)
    return records


def write(directory, records, parts, codes="int8"):
    """Write the records of two parts, cut at the given places."""
    directory.mkdir()
    split, meta = np.split(records, parts), cells_format(WIDTH, VOCABULARY, 2**63, codes)
    runs = [write_run(directory / f"{n}", split[n::2], records.dtype, CELLS) for n in range(2)]
    entry = write_cells(directory, runs, meta)
    for run in runs:
        assert (np.diff(layout.map_file(run.path, run.dtype)["cell"]) >= 0).all()
        run.path.unlink()
    return entry


@pytest.fixture
def opened(tmp_path):
    records = random_records(400)
    return tmp_path / "lens", write(tmp_path / "lens", records, [30, 31, 200]), records


def test_ranges_equal_brute_force(opened):
    directory, meta, records = opened
    cells = Cells(directory, meta)
    assert len(cells) == 400
    pairs = np.array([(c, t) for c in range(CELLS) for t in range(VOCABULARY)])
    ranges = (*cells.ranges(*pairs.T), *cells.ranges_except(*pairs.T))
    for (cell, token), start, stop, begins, ends in zip(pairs.tolist(), *ranges, strict=True):
        rows = np.concatenate([np.arange(*pair) for pair in zip(begins, ends, strict=True)])
        others = records[(records["cell"] == cell) & (records["token"] != token)]["position"]
        assert sorted(cells.records(rows)["position"].tolist()) == sorted(others.tolist())
        expected = records[(records["cell"] == cell) & (records["token"] == token)]
        expected = expected[np.argsort(expected["position"])]
        stored = cells.records(np.arange(start, stop))
        for name in stored.dtype.names:
            np.testing.assert_array_equal(stored[name], expected[name])
    sizes = np.bincount(records["cell"], minlength=CELLS + 1)
    assert cells.sizes(CELLS + 1).tolist() == sizes.tolist()


@given(
    cuts=st.lists(st.integers(0, 150), max_size=6).map(sorted),
    seed=st.integers(0, 100),
    memory=st.sampled_from([1, 200, 2000, 2**20]),
)
def test_neither_parts_nor_memory_change_a_byte(tmp_path_factory, cuts, seed, memory):
    root = tmp_path_factory.mktemp("runs")
    records = random_records(150, seed)
    order = np.random.default_rng(seed).permutation(150)
    one = write(root / "one", records, [])
    with patch.object(module, "SORT_BYTES", memory):
        assert write(root / "many", records[order], cuts) == one
    for name in layout.CELL_FILES:
        assert (root / "one" / name).read_bytes() == (root / "many" / name).read_bytes(), name


def test_runs_of_a_large_file_fit_into_the_addresses_of_a_process(tmp_path):
    """A part of 160 GB has 5,000 runs: as many maps of it would be 800 TB, of 128 TB."""
    dtype = random_records(0).dtype
    with (tmp_path / "positions").open("wb") as file:
        file.truncate(2**35 // dtype.itemsize * dtype.itemsize)  # it takes no disk
    runs = [Run(tmp_path / "positions", dtype, np.array([1]), start) for start in range(5000)]
    assert sum(map(len, module.merged(runs, 0, 1))) == 5000


def test_ranges_are_few_whatever_the_corpus(tmp_path):
    records = random_records(1)
    run = Run(tmp_path, records.dtype, np.full(50_000, 100))
    cells = cells_format(WIDTH, VOCABULARY, 2**63)
    ranges = CellFiles(cells, [run], records.itemsize).ranges
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == 50_000
    assert len(ranges) < 5000


def test_cosines_are_those_of_the_coded_states(opened):
    directory, meta, _ = opened
    cells = Cells(directory, meta)
    records = cells.records(np.arange(20))
    states = torch.from_numpy(random_states(3, WIDTH))
    owner = np.repeat([0, 2], [8, 12])
    coded = records["scale"].astype(np.float64)[:, None] * records["code"] / 127
    expected = (coded * states[owner].numpy()).sum(1)
    cosines = cells.codes.cosines(records, states, owner)
    np.testing.assert_allclose(cosines, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "width"), [("pq", 10), ("pq12", 30)])
def test_pq_stores_the_nearest_centre_of_each_part(name, width):
    size, states = PARTS[name], random_states(300, width)
    codes = ProductCodes.learn(states, name)
    coded = np.empty(40, record_type(cells_format(width, VOCABULARY, 9, name)))
    codes.put(states[:40], coded)
    padded = np.zeros((40, size * parts_of(width, name)))
    padded[:, :width] = states[:40]
    for state, code in zip(padded, coded["code"], strict=True):
        for part, centres in enumerate(codes.centres):
            distances = ((centres - state[size * part : size * part + size]) ** 2).sum(1)
            assert distances[code[part]] == pytest.approx(distances.min(), abs=1e-6)
    by_hand = np.stack(
        [np.concatenate([codes.centres[p, c] for p, c in enumerate(row)]) for row in coded["code"]]
    )[:, :width]
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    np.testing.assert_allclose(codes.states(coded), by_hand, atol=1e-6)
    owner = np.repeat([1, 2, 4], [10, 25, 5])
    cosines = codes.cosines(coded, torch.from_numpy(states[:6]), owner)
    np.testing.assert_allclose(cosines, (by_hand * states[owner]).sum(1), atol=1e-6)


def test_pq_of_few_positions(tmp_path):
    codes = learn_codes(tmp_path, "pq", random_states(3, WIDTH))
    meta = write(tmp_path / "lens", random_records(3, codes=codes), [], codes="pq")
    shutil.copy(tmp_path / layout.CELL_CENTRES_FILE, tmp_path / "lens")
    cells = Cells(tmp_path / "lens", meta)
    states = cells.codes.states(cells.records(np.arange(3)))
    assert states.shape == (3, WIDTH)
    assert torch.isfinite(states).all()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"prismlm\[pq\]"):
        check_codes("pq")
