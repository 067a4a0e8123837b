"""Cells are written from runs in any order, read back, and refused where they were changed."""

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
    check_codes,
    learn_codes,
    parts_of,
    record_type,
)
from tests.helpers.lens_files import write_cells

CELLS, VOCABULARY, WIDTH = 5, 7, 4
FORMAT = cells_format(WIDTH, VOCABULARY, 2**63)


def random_states(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, width, generator=generator)).numpy()


def random_records(count, seed=0):
    """Records as a scan yields them."""
    generator = np.random.default_rng(seed)
    records = np.empty(count, spooled_type(FORMAT))
    records["cell"] = generator.integers(CELLS, size=count)
    records["token"] = generator.integers(VOCABULARY, size=count)
    records["position"] = generator.permutation(10 * count)[:count]
    records["probability"] = generator.random(count)
    records["read"] = generator.integers(VOCABULARY, size=count)
    Int8Codes().put(random_states(count, WIDTH, seed), records)
    return records


def write(directory, records, parts):
    """Write the records of two parts, cut at the given places."""
    directory.mkdir()
    split = np.split(records, parts)
    runs = [write_run(directory / f"{n}", split[n::2], records.dtype, CELLS) for n in range(2)]
    entry = write_cells(directory, runs, FORMAT)
    for run in runs:
        assert (np.diff(layout.map_file(run.path, run.dtype)["cell"]) >= 0).all()
        run.path.unlink()
    return entry


def test_ranges_equal_brute_force(tmp_path):
    records = random_records(400)
    cells = Cells(tmp_path / "lens", write(tmp_path / "lens", records, [30, 31, 200]))
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
    ranges = CellFiles(FORMAT, [run], records.itemsize).ranges
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == 50_000
    assert len(ranges) < 5000


@pytest.mark.parametrize(
    ("name", "width", "count"),
    [("int8", 10, 300), ("pq", 10, 300), ("pq12", 30, 300), ("pq", 4, 3)],
)
def test_coded_states_and_their_cosines(name, width, count, tmp_path):
    """Product quantisation stores the nearest center of each part, learned from few states too."""
    states = random_states(count, width)
    codes = Int8Codes() if name == "int8" else learn_codes(tmp_path, name, states)
    states = states[:40]
    coded = np.empty(len(states), record_type(cells_format(width, 7, 9, name)))
    codes.put(states, coded)
    if name == "int8":
        by_hand = coded["scale"].astype(np.float64)[:, None] * coded["code"] / 127
    else:
        size, parts, code = PARTS[name], parts_of(width, name), coded["code"]
        padded = np.pad(states, ((0, 0), (0, size * parts - width))).reshape(-1, parts, 1, size)
        distances = ((codes.centres - padded) ** 2).sum(3)
        nearest = np.take_along_axis(distances, code[:, :, None].astype(int), 2)[:, :, 0]
        np.testing.assert_allclose(nearest, distances.min(2), atol=1e-6)
        by_hand = codes.centres[np.arange(parts), code].reshape(len(code), -1)[:, :width]
        by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    np.testing.assert_allclose(codes.states(coded), by_hand, atol=1e-6)
    # Of unlike numbers, and a state without any.
    owner = 2 * (np.arange(len(coded)) > len(coded) // 3)
    cosines = codes.cosines(coded, torch.from_numpy(states[:3]), owner)
    expected, near = (by_hand * states[owner]).sum(1), 1e-4 if name == "int8" else 1e-7
    np.testing.assert_allclose(cosines, expected, rtol=near, atol=1e-6)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(InputError, match=r"prismlm\[pq\]"):
        check_codes("pq")
