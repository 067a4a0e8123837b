"""The suffix array against a search that tries every position."""

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
def test_every_sequence_is_found_where_it_stands(texts, queries, dtype, part):
    corpus = TokenCorpus(texts, END, dtype, held_out=range(1, len(texts), 3))
    with TemporaryDirectory() as directory, patch.object(module, "PART", part):
        write_suffixes(Path(directory), corpus, "train")
        # Read by a version with other parts.
        module.PART = 7
        suffixes = Suffixes(Path(directory))
        for query in filter(None, [*queries, *texts, *(text[1:4] for text in texts)]):
            positions = corpus.places(query, "train")
            assert suffixes.count(query) == len(positions)
            assert suffixes.find(query, 100).tolist() == positions
            assert suffixes.find(query, 2).tolist() == positions[:2]
            counts = [len(corpus.places(query[:n], "train")) for n in range(1, len(query) + 1)]
            longest = sum(map(bool, counts))
            assert suffixes.longest_prefix(query) == (longest, counts[longest - 1] * bool(longest))


def test_no_match_crosses_documents(tmp_path):
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS, END), "all")
    suffixes = Suffixes(tmp_path)
    assert suffixes.count([6, END]) == suffixes.count([END]) == suffixes.count([]) == 0
    assert suffixes.longest_prefix([5, 6, END, 6, 7])[0] == 2
    # Adjacent in the file, with an end between them that no query has.
    assert suffixes.count([6, 6]) == 0


@pytest.mark.parametrize("large", [255, 256, 2**16, 2**24, 2**31])
def test_tokens_of_any_width(tmp_path, large):
    corpus = TokenCorpus([[1, large, large + 1], [large, 1]], 0, "uint32")
    write_suffixes(tmp_path, corpus, "all")
    suffixes = Suffixes(tmp_path)
    assert suffixes.find([large], 9).tolist() == [1, 4]
    assert suffixes.count([large, large + 1]) == suffixes.count([large, 1]) == 1


@pytest.mark.parametrize("split", ["train", "heldout", "all"])
def test_a_lens_of_several_shards_needs_no_corpus(tmp_path, split):
    path = write_jsonl(tmp_path / "texts.jsonl", RECORDS)
    settings = {"vocab_size": 300, "shard_tokens": 900, "heldout_fraction": 0.3}
    corpus = build_corpus(path, tmp_path / "corpus", **settings)
    (tmp_path / "lens").mkdir()
    write_suffixes(tmp_path / "lens", corpus, split)
    indexed = set(corpus.split(split).tolist())
    assert len(corpus.meta["shards"]) > 1
    spans = list(zip(corpus.starts.tolist(), corpus.lengths.tolist(), strict=True))
    texts = [corpus.read_tokens(start, length)[:-1].tolist() for start, length in spans]
    shutil.rmtree(corpus.path)
    suffixes = Suffixes(tmp_path / "lens")
    for number, ((start, _), text) in enumerate(zip(spans, texts, strict=True)):
        assert (start in suffixes.find(text, 99).tolist()) == (number in indexed)


def test_without_the_package_there_is_no_order_and_the_error_says_how_to_add_it(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    write_suffixes(tmp_path, TokenCorpus(DOCUMENTS), "all")
    assert not (tmp_path / ORDER_FILE).exists()
    with pytest.raises(InputError, match=r"pip install 'prismlm\[verbatim\]'.*prismlm index"):
        Suffixes(tmp_path)
