"""A lens in an object store answers as on a disk; what a store can do wrong is named."""

import io
import json
import os
import shutil
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import prismlm
from prismlm.cli.app import app
from prismlm.corpus import Corpus
from prismlm.errors import FormatError, InputError, PrismError, StaleLensError
from prismlm.lens import layout, store
from prismlm.lens.build import build_index
from prismlm.lens.cells import Cells
from prismlm.lens.labels.map import map_lens
from prismlm.lens.labels.write import label_lens
from prismlm.lens.lens import Lens, inspect_lens
from prismlm.lens.options import IndexOptions
from prismlm.lens.store import StoredArray, StoredFiles

TEXT = "The patient was given a dose of the drug"
OPTIONS = IndexOptions(window=64, stride=48, split="heldout")
DTYPES = ["<u2", "<i8", [("position", "<u4"), ("code", "u1", (5,))]]


@pytest.fixture(scope="module")
def s3():
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from tests.helpers.s3_server import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Copies of small files go to a directory of the test, and nothing is cached yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "copies"))
    return tmp_path / "copies"


@pytest.fixture
def address(s3, lm, copies, request):
    """The lens in a store that speaks S3."""
    from tests.helpers.s3_server import upload

    return upload(s3[1], lm.lens.path, request.node.name.partition("[")[0])


@pytest.fixture
def in_memory(lm, copies, tmp_path):
    """The lens in a store in memory."""
    import fsspec

    fsspec.filesystem("memory").put(f"{lm.lens.path}/", f"/{tmp_path.name}", recursive=True)
    return f"memory://{tmp_path.name}"


def change(s3, address, name, damage):
    path = f"{address.removeprefix('s3://')}/{name}"
    s3[1].pipe_file(path, damage(s3[1].cat_file(path)))


@given(
    size=st.integers(0, 300),
    dtype=st.sampled_from(DTYPES),
    block=st.sampled_from([1, 16, 64, 2**16]),
    seed=st.integers(0, 100),
)
def test_an_array_in_a_store_equals_one_in_memory(size, dtype, block, seed):
    generator, dtype = np.random.default_rng(seed), np.dtype(dtype)
    values = generator.integers(0, 50, size * dtype.itemsize).astype("u1").view(dtype)
    if dtype.names is None:
        values = np.sort(generator.integers(0, 50, size)).astype(dtype)
    file, requests = io.BytesIO(), []
    np.save(file, values)
    data = file.getvalue()

    def read(spans):
        requests.append(spans)
        return [data[first:last] for first, last in spans]

    with patch.object(store, "BLOCK", block):
        array = StoredArray(read, data[:4096])
    rows = generator.integers(0, max(1, size), 20 if size else 0)
    assert np.array_equal(array.take(rows), values[rows])
    assert len(requests) <= 1  # all blocks at once
    assert len(array) == size
    for first, last in np.sort(generator.integers(0, size + 1, (5, 2))).tolist():
        assert np.array_equal(array[first:last], values[first:last])
    assert np.array_equal(array[:], values)
    if dtype.names is None:
        queries = generator.integers(-2, 53, 30)
        assert np.array_equal(array.searchsorted(queries), np.searchsorted(values, queries))


def test_cells_in_ranges_equal_those_of_one_file(lm, short_corpus, tmp_path, copies):
    import fsspec

    corpus, paths = Corpus.open(short_corpus), (tmp_path / "one", tmp_path / "several")
    for path, size in zip(paths, (2**30, 30_000), strict=True):
        build_index(lm.model, lm.head, corpus, path, replace(OPTIONS, range_bytes=size))
    fsspec.filesystem("memory").put(str(paths[1]), f"/{tmp_path.name}", recursive=True)
    places = *paths, f"memory://{tmp_path.name}"
    lenses = [Lens.open(place, lm.model, lm.head) for place in places]
    assert len(lenses[1].meta.cells["ranges"]) > 2
    assert "ranges" not in lenses[0].meta.cells
    one, count = lenses[0].cells, lm.lens.num_prototypes
    generator, vocabulary = np.random.default_rng(0), one.meta.vocabulary
    cells = generator.integers(0, count, 5000)
    tokens = generator.choice(one.keys_and_starts[0], 5000) % vocabulary
    rows = generator.integers(0, len(one), 3000)

    def answers(of):
        pairs = of.ranges(cells, tokens), of.ranges_except(cells, tokens), of.cells_of(3, count)
        single = of.records(rows), of.token_rates, of.sizes(count), of.rows_of(int(cells[0]))
        return [*sum(pairs, ()), *single]

    for several in lenses[1:]:
        assert all(map(np.array_equal, answers(one), answers(several.cells)))
    name = "cells-00001.npy"
    (paths[1] / name).write_bytes((paths[1] / name).read_bytes()[:-5])
    with pytest.raises(FormatError, match=name):
        Cells(paths[1], lenses[1].meta.cells)


def test_answers_from_a_store_equal_those_from_a_disk(lm, tiny_model, address, monkeypatch):
    monkeypatch.setattr(store, "BLOCK", 2**14)
    stored = prismlm.load(tiny_model, lens=address)
    files = stored.lens.files
    assert stored.lens.address == address
    assert files.bytes_read < 10**5
    expected, trace = (one.explain(TEXT, generate=3) for one in (lm, stored))
    same = {"lens": address}
    assert trace.to_dict(against=3) == expected.to_dict(against=3) | same
    assert trace.documents(3)[0].text
    assert trace.verbatim(3) == expected.verbatim(3)
    read = files.bytes_read
    assert stored.explain(TEXT, generate=3).to_dict() == expected.to_dict() | same
    assert files.bytes_read == read  # everything was in the cache
    assert stored.lens.names == lm.lens.names
    copy = stored.lens.path / layout.INDEX_FILE
    copy.unlink(missing_ok=True)
    copy.write_bytes(b"damaged")
    assert inspect_lens(stored.lens) == inspect_lens(lm.lens)
    assert copy.read_bytes() == (lm.lens.path / copy.name).read_bytes()
    arguments = ["explain", str(tiny_model), TEXT, "--lens", address, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["lens"] == address


def test_what_would_write_is_refused(tiny_model, in_memory):
    stored = prismlm.load(tiny_model, lens=in_memory)
    for work in (
        lambda: label_lens(stored.lens, stored.model),
        lambda: map_lens(stored.lens, stored.head),
        lambda: stored.push_to_hub("acme/tiny", dry_run=True),
    ):
        with pytest.raises(InputError, match=f"needs a lens on a disk, and {in_memory} is in"):
            work()


def test_addresses_without_a_lens(tiny_model, s3, copies, monkeypatch):
    for nothing in ("s3://no-such-bucket/lens", "memory://none"):
        with pytest.raises(InputError, match=f"there is no lens at {nothing}"):
            prismlm.load(tiny_model, lens=nothing)
    for unknown, named in (("nowhere://lens", "nowhere"), ("oci://bucket/lens", "ocifs")):
        with pytest.raises(InputError, match=rf"{unknown} cannot be read .*{named}"):
            prismlm.load(tiny_model, lens=unknown)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    type(s3[1]).clear_instance_cache()
    with pytest.raises(PrismError, match=r"s3://lenses/private.*(redential|Forbidden|denied)"):
        prismlm.load(tiny_model, lens="s3://lenses/private")
    type(s3[1]).clear_instance_cache()


@pytest.mark.parametrize("name", [layout.META_FILE, layout.CELLS_FILE])
def test_a_lens_that_is_rebuilt_is_noticed(tiny_model, address, s3, monkeypatch, name):
    monkeypatch.setattr(store, "COMPARED_EVERY", 0.0)
    stored = prismlm.load(tiny_model, lens=address)
    assert stored.lens.sentence(5)
    change(s3, address, name, lambda data: data[:-10] + bytes([data[-10] ^ 4]) + data[-9:])
    with pytest.raises(StaleLensError, match="rebuilt or removed since it was opened"):
        stored.explain(TEXT).sources()


def test_a_file_that_is_cut_or_damaged(tiny_model, address, s3):
    index, other = attrgetter("index"), "is damaged or of another lens"
    for read, name, damage, problem in (
        (inspect_lens, layout.CELLS_FILE, lambda data: data[:-1] + b"?", other),
        (index, layout.INDEX_FILE, lambda data: b"?" + data[1:], other),
        (index, layout.CELL_KEYS_FILE, lambda data: b"?" + data[1:], "is damaged"),
        (index, layout.CELLS_FILE, lambda data: data[:-7], "has .* bytes.* the store lists all"),
    ):
        change(s3, address, name, damage)
        with pytest.raises(FormatError, match=rf"{address}/{name} {problem}"):
            read(prismlm.load(tiny_model, lens=address).lens)


def test_ranges_are_read_through_a_bounded_cache(lm, in_memory, copies, monkeypatch):
    monkeypatch.setenv(store.CACHE_VARIABLE, "1")
    files = StoredFiles(in_memory)
    meta = files.read_meta()
    (cells,) = files.arrays(layout.CELLS_FILE)
    read = files.bytes_read
    assert len(cells[:]) == len(cells)
    # Neighbouring blocks share requests.
    assert files.requests <= 5 + (files.bytes_read - read) // store.MOST_AT_ONCE
    assert files.bytes_read - read > 10**6
    assert 0 < sum(map(len, files._blocks.values())) <= 10**6
    before, last = files.requests, np.arange(len(cells) - 5, len(cells))
    assert len(cells.take(last)) == 5
    assert files.requests == before
    # Of documents, the footer, and then columns and row groups.
    opened, expected = Cells(files, meta.cells), lm.lens.cells
    monkeypatch.setattr(store, "GAP", 0)
    assert len(opened.documents) == len(expected.documents)
    read = files.bytes_read
    assert np.array_equal(opened.starts, expected.starts)
    for column in ("source", "license"):
        assert opened.keys(column).names == expected.keys(column).names
    assert files.bytes_read - read < meta.files[layout.CELL_DOCUMENTS_FILE]["bytes"] / 2
    assert opened.facts(3) == expected.facts(3)
    assert not [*copies.rglob(layout.CELL_DOCUMENTS_FILE)]
    monkeypatch.setenv(store.CACHE_VARIABLE, "a lot")
    with pytest.raises(InputError, match="PRISMLM_LENS_CACHE_MB"):
        StoredFiles(in_memory)


def test_a_store_that_fails_half_way(lm, copies, in_memory):
    """After any number of requests, the error names the file; no half copy stays."""

    def requests_left(after):
        files, left = StoredFiles(in_memory), iter(range(after))
        memory, error = files._fs, [None, OSError("gone"), RuntimeError("cut")][after % 3]

        def cat_file(path, start=None, end=None):
            data = memory.cat_file(path, start=start, end=end)
            if next(left, None) is not None:
                return data
            if error is not None:
                raise error
            return data[: len(data) // 2]

        def get_file(path, to):
            Path(to).write_bytes(cat_file(path))

        files._fs = Mock(wraps=memory, cat_file=cat_file, get_file=get_file)
        cells = Cells(files, files.read_meta().cells)
        cells.records(np.arange(5))
        assert cells.facts(3)["doc_id"]
        files.check([layout.INDEX_FILE])
        return len([*left])

    needed = 1000 - requests_left(1000)
    assert needed > 4
    for after in range(needed):
        shutil.rmtree(copies, ignore_errors=True)
        with pytest.raises(PrismError, match=in_memory):
            requests_left(after)
        for copy in copies.rglob("*.*"):
            assert copy.read_bytes() == (lm.lens.path / copy.name).read_bytes()
