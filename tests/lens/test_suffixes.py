"""The suffix array against a search that tries every place."""

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismlm.corpus import build_corpus
from prismlm.errors import InputError
from prismlm.lens import suffixes as module
from prismlm.lens.suffixes import ORDER_FILE, Suffixes, write_suffixes
from tests.helpers.records import RECORDS, write_jsonl
from tests.helpers.token_corpus import TokenCorpus

END = 2
DOCUMENTS = [[5, 6, 7, 5, 6], [6, 7, 8], [], [5, 6, 7, 5, 6, 9]]
documents = st.lists(st.lists(st.sampled_from([0, 1, 3, 300]), max_size=12), min_size=1, max_size=6)


@given(documents, documents, st.sampled_from(["uint16", "uint32"]), st.sampled_from([1, 9, 99]))
def test_every_sequence_is_found_where_it_stands(texts, asked, dtype, part):
    corpus = TokenCorpus(texts, END, dtype, held_out=range(1, len(texts), 3))
    with TemporaryDirectory() as directory, patch.object(module, "PART", part):
        write_suffixes(Path(directory), corpus, "train")
        # Read by a version with other parts.
        module.PART = 7
        suffixes = Suffixes(Path(directory))
        for wanted in filter(None, [*asked, *texts, *(text[1:4] for text in texts)]):
            places = corpus.places(wanted, "train")
            assert suffixes.count(wanted) == len(places)
            assert suffixes.find(wanted, 100).tolist() == places
            assert suffixes.find(wanted, 2).tolist() == places[:2]
            standing = [n for n in range(1, len(wanted) + 1) if corpus.places(wanted[:n], "train")]
            length, count = suffixes.longest_prefix(wanted)
            assert length == max(standing, default=0)
            assert count == (len(corpus.places(wanted[:length], "train")) if length else 0)


def test_no_match_goes_beyond_a_document(tmp_path):
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS, END), "all")
    suffixes = Suffixes(tmp_path)
    assert suffixes.count([6, END]) == suffixes.count([END]) == suffixes.count([]) == 0
    assert suffixes.longest_prefix([5, 6, END, 6, 7])[0] == 2
    # Side by side in the copy, with an end between them that no query has.
    assert suffixes.count([6, 6]) == 0


@pytest.mark.parametrize("large", [255, 256, 2**16, 2**24, 2**31])
def test_tokens_of_any_width(tmp_path, large):
    corpus = TokenCorpus([[1, large, large + 1], [large, 1]], 0, "uint32")
    write_suffixes(tmp_path, corpus, "all")
    suffixes = Suffixes(tmp_path)
    assert suffixes.find([large], 9).tolist() == [1, 4]
    assert suffixes.count([large, large + 1]) == suffixes.count([large, 1]) == 1


@pytest.mark.parametrize("split", ["train", "heldout", "all"])
def test_the_lens_needs_the_corpus_no_more(tmp_path, split):
    path = write_jsonl(tmp_path / "texts.jsonl", RECORDS)
    out = tmp_path / "corpus"
    corpus = build_corpus(path, out, vocab_size=300, shard_tokens=900, heldout_fraction=0.3)
    (tmp_path / "lens").mkdir()
    write_suffixes(tmp_path / "lens", corpus, split)
    indexed = set(corpus.split(split).tolist())
    assert len(corpus.meta["shards"]) > 1
    texts = [
        (int(start), corpus.read_tokens(int(start), int(length))[:-1].tolist())
        for start, length in zip(corpus.starts, corpus.lengths, strict=True)
    ]
    shutil.rmtree(corpus.path)
    suffixes = Suffixes(tmp_path / "lens")
    for number, (start, text) in enumerate(texts):
        assert (start in suffixes.find(text, 99).tolist()) == (number in indexed)


def test_without_the_package_a_lens_has_none_and_says_how_to_add_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS), "all")
    assert not (tmp_path / ORDER_FILE).exists()
    with pytest.raises(InputError, match=r"pip install 'prismlm\[verbatim\]'.*prismlm index"):
        Suffixes(tmp_path)
