"""The suffix array against a search that tries every place."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismlm.corpus import Corpus, build_corpus
from prismlm.errors import FormatError, InputError
from prismlm.index import suffixes as module
from prismlm.index.suffixes import (
    FILES,
    ORDER_FILE,
    Suffixes,
    has_suffixes,
    parts_of,
    write_suffixes,
)
from tests.helpers.records import RECORDS, write_jsonl
from tests.helpers.token_corpus import TokenCorpus

END = 2
DOCUMENTS = [[5, 6, 7, 5, 6], [6, 7, 8], [], [5, 6, 7, 5, 6, 9]]


@pytest.fixture
def written(tmp_path):
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS, END), "all")
    return tmp_path


documents = st.lists(st.lists(st.sampled_from([0, 1, 3, 300]), max_size=12), min_size=1, max_size=6)


@given(documents, documents, st.sampled_from(["uint16", "uint32"]), st.sampled_from([1, 9, 99]))
def test_every_sequence_is_found_where_it_stands(texts, asked, dtype, part):
    corpus = TokenCorpus(texts, END, dtype, held_out=range(1, len(texts), 3))
    with TemporaryDirectory() as directory, patch.object(module, "PART", part):
        write_suffixes(Path(directory), corpus, "train")
        # Read by a version with other parts.
        module.PART = 7
        suffixes = Suffixes.open(directory)
        for wanted in filter(None, [*asked, *texts, *(text[1:4] for text in texts)]):
            places = corpus.places(wanted, "train")
            assert suffixes.count(wanted) == len(places)
            assert suffixes.find(wanted, 100).tolist() == places
            assert suffixes.find(wanted, 2).tolist() == places[:2]
            standing = [n for n in range(1, len(wanted) + 1) if corpus.places(wanted[:n], "train")]
            length, count = suffixes.longest_prefix(wanted)
            assert length == max(standing, default=0)
            assert count == (len(corpus.places(wanted[:length], "train")) if length else 0)


def test_a_hand_written_example(written):
    suffixes = Suffixes.open(written)
    assert suffixes.count([5, 6]) == 4
    assert suffixes.find([5, 6, 7], 9).tolist() == [0, 11]
    assert suffixes.longest_prefix([6, 7, 5, 6, 9, 9])[0] == 5
    assert suffixes.longest_prefix([4, 5])[0] == 0
    assert len(suffixes) == 14
    assert repr(suffixes) == f"Suffixes('{written}', 14 tokens, 4 documents)"


def test_no_match_goes_beyond_a_document(written):
    suffixes = Suffixes.open(written)
    assert suffixes.count([6, END]) == suffixes.count([END]) == suffixes.count([]) == 0
    assert suffixes.longest_prefix([5, 6, END, 6, 7])[0] == 2
    # Side by side in the copy, with an end between them that no query has.
    assert suffixes.count([6, 6]) == 0


@pytest.mark.parametrize("token", [-1, 2**16, 2**40])
def test_tokens_that_cannot_be_stored_stand_nowhere(written, token):
    suffixes = Suffixes.open(written)
    assert suffixes.count([token]) == 0
    assert suffixes.longest_prefix([5, token]) == (1, suffixes.count([5]))


@pytest.mark.parametrize("large", [255, 256, 2**16, 2**24, 2**31])
def test_tokens_of_any_width(tmp_path, large):
    corpus = TokenCorpus([[1, large, large + 1], [large, 1]], 0, "uint32")
    write_suffixes(tmp_path, corpus, "all")
    suffixes = Suffixes.open(tmp_path)
    assert suffixes.find([large], 9).tolist() == [1, 4]
    assert suffixes.count([large, large + 1]) == suffixes.count([large, 1]) == 1


def test_a_long_text_is_found_to_its_end(tmp_path):
    text = np.random.default_rng(0).integers(1, 4, 300).tolist()
    write_suffixes(tmp_path, TokenCorpus([text]), "all")
    suffixes = Suffixes.open(tmp_path)
    for length in (31, 32, 33, 64, 300):
        assert suffixes.longest_prefix(text[:length]) == (length, suffixes.count(text[:length]))
    assert suffixes.longest_prefix([*text[:100], 9])[0] == 100


def test_another_run_changes_no_byte(tmp_path):
    corpus = TokenCorpus(DOCUMENTS, END)
    write_suffixes(tmp_path, corpus, "all")
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    write_suffixes(tmp_path, corpus, "all")
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == before


def test_parts_are_whole_documents_as_large_as_fits(monkeypatch):
    monkeypatch.setattr(module, "PART", 10)
    firsts = np.array([0, 4, 8, 11, 31, 33])
    # 4 + 4 fit and 3 more do not; a document of 20 stands alone; the rest fits.
    assert parts_of(firsts, 40) == [(0, 8), (8, 11), (11, 31), (31, 40)]
    assert parts_of(np.array([0]), 100) == [(0, 100)]


def test_places_of_eight_bytes(written, monkeypatch):
    before = np.load(written / ORDER_FILE, mmap_mode="r").tolist()
    monkeypatch.setattr(module, "LARGEST_SHORT", 3)
    write_suffixes(written, TokenCorpus(DOCUMENTS, END), "all")
    order = np.load(written / ORDER_FILE, mmap_mode="r")
    assert (order.dtype, order.tolist()) == (np.int64, before)
    assert Suffixes.open(written).find([5, 6, 7], 9).tolist() == [0, 11]


def test_documents_without_text(tmp_path):
    write_suffixes(tmp_path, TokenCorpus([[], []], END), "all")
    suffixes = Suffixes.open(tmp_path)
    assert (len(suffixes), suffixes.count([5]), suffixes.longest_prefix([5])) == (0, 0, (0, 0))


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(InputError, match="no documents in its heldout split"):
        write_suffixes(tmp_path, TokenCorpus(DOCUMENTS), "heldout")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("built")
    path = write_jsonl(directory / "texts.jsonl", RECORDS)
    out = directory / "corpus"
    return build_corpus(path, out, vocab_size=300, shard_tokens=900, heldout_fraction=0.3).path


@pytest.mark.parametrize("split", ["train", "heldout", "all"])
def test_the_lens_needs_the_corpus_no_more(built, tmp_path, split):
    corpus = Corpus.open(shutil.copytree(built, tmp_path / "corpus"))
    (tmp_path / "lens").mkdir()
    write_suffixes(tmp_path / "lens", corpus, split)
    chosen = set(corpus.split(split).tolist())
    assert len(corpus.meta["shards"]) > 1
    texts = [
        (int(start), corpus.read_tokens(int(start), int(length))[:-1].tolist())
        for start, length in zip(corpus.starts, corpus.lengths, strict=True)
    ]
    shutil.rmtree(corpus.path)
    suffixes = Suffixes.open(tmp_path / "lens")
    for number, (start, text) in enumerate(texts):
        assert (start in suffixes.find(text, 99).tolist()) == (number in chosen)


def test_without_the_package_a_lens_has_none_and_says_how_to_add_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS), "all")
    assert not has_suffixes(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match=r"pip install 'prismlm\[verbatim\]'.*prismlm index"):
        Suffixes.open(tmp_path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "cut off", "other", "of another lens"])
def test_damage_is_noticed_when_it_is_opened(written, name, how):
    file = written / name
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "of another lens":
        np.save(file, np.zeros((3, 7), dtype=np.int64))
    else:
        file.write_bytes({"empty": b"", "cut off": content[:-1], "other": b"PK" * 200}[how])
    with pytest.raises(FormatError, match=rf"{name}.*Build the lens again"):
        Suffixes.open(written)
