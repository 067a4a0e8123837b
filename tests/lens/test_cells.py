"""Cells are written from runs in any order, read back, and refused where they were changed."""

import shutil
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.corpus import Corpus
from prismlm.errors import FormatError
from prismlm.lens import cells as module
from prismlm.lens import layout
from prismlm.lens.cells import Cells, Spool, spooled_type, write_cells, write_documents
from prismlm.lens.codes import quantise
from prismlm.progress import SILENT

CELLS, VOCABULARY, WIDTH = 5, 7, 4


def random_records(count, seed=0, cells=CELLS):
    generator = np.random.default_rng(seed)
    records = np.empty(count, spooled_type(WIDTH))
    records["cell"] = generator.integers(cells, size=count)
    records["token"] = generator.integers(VOCABULARY, size=count)
    records["position"] = generator.permutation(10 * count)[:count]
    records["probability"] = generator.random(count)
    records["read"] = generator.integers(VOCABULARY, size=count)
    states = torch.nn.functional.normalize(torch.from_numpy(generator.normal(size=(count, WIDTH))))
    records["scale"], records["code"] = quantise(states.float().numpy())
    return records


def write(directory, records, parts, **options):
    """Write the records in runs of two spools, cut at the given places."""
    directory.mkdir()
    spools = [Spool(directory / f"spool-{number}", WIDTH) for number in range(2)]
    for number, part in enumerate(np.split(records, parts)):
        spools[number % 2].add(part)
        spools[number % 2].flush()
    meta = write_cells(directory, spools, CELLS, VOCABULARY, 1.0, SILENT, **options)
    for spool in spools:
        spool.path.unlink(missing_ok=True)
    return meta


@pytest.fixture(scope="module")
def documents(tiny_corpus, tmp_path_factory):
    """The table of documents of a real corpus."""
    directory = tmp_path_factory.mktemp("documents")
    write_documents(directory, Corpus.open(tiny_corpus), "heldout")
    return directory / layout.CELL_DOCUMENTS_FILE


@pytest.fixture
def opened(tmp_path, documents):
    records = random_records(400)
    meta = write(tmp_path / "lens", records, [30, 31, 200])
    shutil.copy(documents, tmp_path / "lens")
    return tmp_path / "lens", meta, records


def test_ranges_hold_what_brute_force_finds(opened):
    directory, meta, records = opened
    cells = Cells(directory, meta)
    assert len(cells) == 400
    wanted = np.array([(c, t) for c in range(CELLS) for t in range(VOCABULARY)])
    ranges = (*cells.ranges(*wanted.T), *cells.ranges_except(*wanted.T))
    for (cell, token), start, stop, begins, ends in zip(wanted.tolist(), *ranges, strict=True):
        rows = np.concatenate([np.arange(*pair) for pair in zip(begins, ends, strict=True)])
        others = records[(records["cell"] == cell) & (records["token"] != token)]["position"]
        assert sorted(cells.records(rows)["position"].tolist()) == sorted(others.tolist())
        chosen = records[(records["cell"] == cell) & (records["token"] == token)]
        chosen = chosen[np.argsort(chosen["position"])]
        found = cells.records(np.arange(start, stop))
        for name in found.dtype.names:
            np.testing.assert_array_equal(found[name], chosen[name])
    expected = [int((records["cell"] == cell).sum()) for cell in range(CELLS + 1)]
    assert cells.sizes(CELLS + 1).tolist() == expected


@given(
    cuts=st.lists(st.integers(0, 150), max_size=6).map(sorted),
    seed=st.integers(0, 100),
    memory=st.sampled_from([1, 2000, 2**20]),
    codes=st.sampled_from(["int8", "pq"]),
)
def test_neither_runs_nor_memory_change_a_byte(tmp_path_factory, cuts, seed, memory, codes):
    root = tmp_path_factory.mktemp("runs")
    records = random_records(150, seed)
    order = np.random.default_rng(seed).permutation(150)
    one = write(root / "one", records, [], codes=codes)
    with patch.object(module, "SORT_BYTES", memory):
        many = write(root / "many", records[order], cuts, codes=codes)
    assert one == many
    centres = [layout.CELL_CENTRES_FILE] if codes == "pq" else []
    for name in (*layout.CELL_FILES, *centres):
        assert (root / "one" / name).read_bytes() == (root / "many" / name).read_bytes(), name


def test_states_are_within_half_a_step_of_a_code():
    states = torch.nn.functional.normalize(torch.randn(50, 160)).numpy()
    scales, codes = quantise(states)
    restored = scales.astype(np.float32)[:, None] * codes / 127
    assert (np.abs(restored - states) <= 0.501 * scales[:, None] / 127 + 1e-4).all()
    cosines = (restored * states).sum(1) / np.linalg.norm(restored, axis=1)
    assert cosines.min() > 0.9999


def test_cosines_are_those_of_the_coded_states(opened):
    directory, meta, _ = opened
    cells = Cells(directory, meta)
    records = cells.records(np.arange(20))
    states = torch.nn.functional.normalize(torch.randn(3, WIDTH), dim=1)
    owner = np.repeat([0, 2], [8, 12])
    by_hand = [
        sum(
            float(r["scale"]) * int(c) / 127 * float(z)
            for c, z in zip(r["code"], states[number], strict=True)
        )
        for r, number in zip(records, owner, strict=True)
    ]
    found = cells.codes.cosines(records, states, owner)
    np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-6)


def test_a_position_lies_in_its_document(opened, tiny_corpus):
    directory, meta, _ = opened
    cells, corpus = Cells(directory, meta), Corpus.open(tiny_corpus)
    held_out = corpus.split("heldout")
    ends = corpus.starts[held_out] + corpus.lengths[held_out] - 1
    assert cells.document_of(corpus.starts[held_out]).tolist() == list(range(len(held_out)))
    assert cells.document_of(ends).tolist() == list(range(len(held_out)))
    assert cells.document_rates.sum() == pytest.approx(1)
    assert cells.base_rates("source").sum() == pytest.approx(1)


@pytest.mark.parametrize("name", layout.CELL_FILES)
def test_a_truncated_file_is_refused(opened, name):
    directory, meta, _ = opened
    data = (directory / name).read_bytes()
    (directory / name).write_bytes(data[:-5])
    with pytest.raises(FormatError, match=name):
        Cells(directory, meta)
