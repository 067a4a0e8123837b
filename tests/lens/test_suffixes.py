"""Suffix arrays, sorted in memory and on disk, against a search that tries every position."""

import importlib.util
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismlm import fingerprints
from prismlm.errors import PrismError
from prismlm.lens import layout, suffixes
from prismlm.lens.lens import Lens
from prismlm.lens.suffixes import ORDER_FILE, Suffixes
from tests.helpers.lens_files import write_suffixes
from tests.helpers.token_corpus import TokenCorpus

END = 2
DOCUMENTS = [[5, 6, 7, 5, 6], [6, 7, 8], [], [5, 6, 7, 5, 6, 9]]
documents = st.lists(st.lists(st.sampled_from([0, 1, 3, 300]), max_size=12), min_size=1, max_size=6)
needs_infini_gram = pytest.mark.skipif(
    importlib.util.find_spec("infini_gram") is None, reason="infini-gram is not installed"
)
IN_MEMORY = [{"PART": tokens} for tokens in (1, 9, 99)]
# Pieces of three tokens; a text has at most 13.
ON_DISK = [
    {"LARGE": 0.5, "MAX_PARTS": 1, "MAX_PART_BYTES": size, "PIECE": 3, "OVERLAP": 64}
    | {"TOKENS_AT_ONCE": 5}
    for size in (8, 36, 120)
]


@pytest.mark.parametrize(
    "ways", [IN_MEMORY, pytest.param(ON_DISK, marks=needs_infini_gram)], ids=["memory", "disk"]
)
@given(documents, documents, st.sampled_from(["uint16", "uint32"]), st.data())
def test_every_sequence_is_found_where_it_stands(ways, texts, queries, dtype, data):
    corpus = TokenCorpus(texts, END, dtype, held_out=range(1, len(texts), 3))
    with TemporaryDirectory() as directory:
        with patch.multiple(suffixes, **data.draw(st.sampled_from(ways))):
            write_suffixes(Path(directory), corpus, "train")
        assert {path.suffix for path in Path(directory).iterdir()} == {".npy"}
        # Read by a version with other parts.
        searched = Suffixes(Path(directory))
        assert len(searched) == sum(len(texts[n]) for n in corpus.split("train"))
        for number in corpus.split("train").tolist():
            stored = searched.tokens(int(corpus.starts[number]), len(texts[number]))
            assert stored.tolist() == texts[number]
        for query in filter(None, [*queries, *texts, *(text[1:4] for text in texts)]):
            positions = corpus.places(query, "train")
            assert searched.count(query) == len(positions)
            for limit in (0, 1, 2, 100):
                assert searched.find(query, limit).tolist() == positions[:limit]
            counts = [len(corpus.places(query[:n], "train")) for n in range(1, len(query) + 1)]
            longest = sum(map(bool, counts))
            assert searched.longest_prefix(query) == (longest, counts[longest - 1] * bool(longest))


@pytest.mark.parametrize(("most_bytes", "count"), [(2**20, 4), (800, 6)])
def test_parts_of_a_large_text_hold_whole_documents_and_bounded_bytes(most_bytes, count):
    lengths = [500, 3, 3, 3, *[99] * 5]
    corpus = TokenCorpus([[1] * length for length in lengths], 0, "uint32")
    with patch.multiple(suffixes, LARGE=100, MAX_PARTS=4, MAX_PART_BYTES=most_bytes):
        firsts, _ = suffixes.divided(corpus, "all")
    assert (firsts[0], firsts[-1]) == (0, len(lengths))
    sums = np.add.reduceat(corpus.lengths, firsts[:-1])
    assert sums.sum() == corpus.lengths.sum()
    # Where a document ends after a bound, it is in the next part.
    assert sums.max() <= corpus.lengths.sum() / count + max(corpus.lengths)


def test_files_of_a_text_that_is_not_large_stay_as_shipped(tmp_path):
    with patch.object(suffixes, "PART", 9):
        write_suffixes(tmp_path, TokenCorpus(DOCUMENTS, END), "all")
    digests = [fingerprints.of_file(tmp_path / name)[:8] for name in suffixes.FILES]
    assert digests == ["68da749a", "b6b7aad7", "209c710d"]
    searched = Suffixes(tmp_path)
    for impossible in ([6, END], [END], [], [6, 2**16], [-1]):
        assert searched.count(impossible) == len(searched.find(impossible, 9)) == 0
    assert searched.longest_prefix([5, 6, END, 6, 7])[0] == 2
    # Adjacent in the file, with an end between them that no query has.
    assert searched.count([6, 6]) == 0


@pytest.mark.parametrize("large", [255, 2**31])
def test_tokens_of_any_width(tmp_path, large):
    write_suffixes(tmp_path, TokenCorpus([[1, large, large + 1], [large, 1]], 0, "uint32"), "all")
    searched = Suffixes(tmp_path)
    assert searched.find([large], 9).tolist() == [1, 4]
    assert searched.count([large, large + 1]) == searched.count([large, 1]) == 1


def test_without_the_package_there_is_no_order_and_a_hint(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS), "all")
    assert not (tmp_path / ORDER_FILE).exists()
    why = suffixes.unsearchable([path.name for path in tmp_path.iterdir()])
    assert "pip install 'prismlm[verbatim]'" in why


@needs_infini_gram
def test_a_sort_that_fails_leaves_nothing_that_looks_finished(tmp_path, monkeypatch):
    corpus = TokenCorpus(DOCUMENTS, END)
    monkeypatch.setattr(suffixes, "LARGE", 0.5)
    # Killed for memory; with panics of threads and exit status 0; half a file.
    for script in ("kill -9 $$", "echo panicked >&2", "mkdir -p pieces; echo 1 > pieces/1"):
        program = tmp_path / "rust_indexing"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        spec = importlib.util.spec_from_file_location("infini_gram", tmp_path / "__init__.py")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        lens = tmp_path / "lens"
        lens.mkdir()
        with pytest.raises(PrismError, match="infini-gram"):
            write_suffixes(lens, corpus, "all")
        assert not [*lens.glob("suffixes-order-*")]
        shutil.rmtree(lens)


@needs_infini_gram
def test_a_lens_of_a_large_text_is_searched_and_gives_its_text(lm, tmp_path, monkeypatch):
    path = shutil.copytree(lm.lens.path, tmp_path / "lens")
    corpus, before = lm.lens.corpus, lm.lens.suffixes

    def open_lens():
        layout.write_meta(path, replace(lm.lens.meta, files=layout.describe_files(path)))
        return Lens.open(path, lm.model, lm.head)

    for name in suffixes.FILES:
        (path / name).unlink()
    monkeypatch.setattr(suffixes, "LARGE", corpus.num_tokens // 3)
    write_suffixes(path, corpus, lm.lens.meta.split)
    lens, position = open_lens(), int(corpus.starts[corpus.split("train")[-1]])
    text = before.tokens(position, 9)
    assert len(list(path.glob("suffixes-order-*.npy"))) == 3
    assert lens.suffixes.tokens(position, 9).tolist() == text.tolist()
    for query in (text, text[:1], text[3:5]):
        assert lens.suffixes.count(query) == before.count(query)
        assert lens.suffixes.find(query, 7).tolist() == before.find(query, 7).tolist()
    # As where infini-gram is not installed.
    for file in path.glob("suffixes-order-*.npy"):
        file.unlink()
    lens = open_lens()
    assert lens.suffixes is None
    assert "prismlm[infini-gram]" in str(suffixes.unsearchable(lens.meta.files))
    lens.tokenizer = lm.tokenizer
    assert lens._own_text.read_tokens(position, 9).tolist() == text.tolist()
