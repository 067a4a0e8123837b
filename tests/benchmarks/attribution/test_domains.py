"""Texts that a corpus does not have, and what is said of them beside the model, by hand."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prismlm
from benchmarks.attribution import domains
from prismlm.corpus import build_corpus
from prismlm.corpus.tokenizer import train_tokenizer
from tests.helpers.predictions import attributed

ROWS = [
    ("a", "law", "the court of law"),
    ("b", "law", "the judge of the court"),
    ("c", "sea", "the sea and the ship"),
]


def write(rows, path):
    columns = dict(zip(("id", "domain", "text"), map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def corpus(tmp_path):
    train_tokenizer((text for *_, text in ROWS), 300).save_pretrained(tmp_path / "tokenizer")
    write(ROWS, tmp_path / "texts.parquet")
    return build_corpus(
        tmp_path / "texts.parquet", tmp_path / "corpus", tokenizer=str(tmp_path / "tokenizer")
    )


def test_domains_of_a_token_are_those_of_its_places(corpus):
    found = domains.domains_of_tokens(corpus, ["law", "sea"])
    tokens, owners = corpus.tokens(0, corpus.num_tokens), np.repeat([0, 0, 1], corpus.lengths)
    for token in set(tokens.tolist()):
        places = owners[tokens == token]
        assert found[token] == pytest.approx([(places == 0).mean(), (places == 1).mean()])
    assert found.sum() == pytest.approx(len(set(tokens.tolist())))


def test_texts_are_those_that_the_corpus_does_not_have(corpus, tmp_path, monkeypatch):
    more = [*ROWS, ("d", "law", "a statute of the sea " * 40), ("e", "sea", "the sea")]
    write(more, tmp_path / "sample.parquet")
    monkeypatch.setattr(domains, "sample_path", lambda: tmp_path / "sample.parquet")
    found = domains.beginnings(corpus, ["law", "sea"], 5, 8, 0)
    assert [domain for domain, _ in found] == ["law", "sea"]
    assert found[1][1] == "the sea"
    assert more[3][2].startswith(found[0][1])
    assert len(corpus.tokenizer(found[0][1])["input_ids"]) == 8


def test_a_text_is_read_behind_one_of_another_domain():
    kinds = ["law", "sea", "law", "law"]
    found = domains.pairs_of(kinds, 0)
    assert [second for _, second in found] == [0, 1, 2, 3]
    assert all(kinds[first] != kinds[second] for first, second in found)


def test_shares_alone_know_no_text_before(tiny_model):
    trace = prismlm.load(tiny_model).explain("Once upon a time there was a", generate=6)[:]
    names = [one.key for one in trace.sources("domain").items]
    told, alone = (domains.shares_of(trace, names, alone=one) for one in (False, True))
    assert told.sum() == pytest.approx(1 - trace.sources("domain").unattributed)
    parts = [attributed(trace.predictions[t : t + 1], trace.lens) for t in range(len(trace))]
    placed = sum(float(part.places.value.sum()) for part in parts)
    assert alone.sum() == pytest.approx(placed / trace.attribution().total)
    assert np.abs(told - alone).max() > 1e-3
    # The first prediction has nothing before it.
    told, alone = (domains.shares_of(trace[:1], names, alone=one) for one in (False, True))
    assert told == pytest.approx(alone)
