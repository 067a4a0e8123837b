"""Tables 1 and 15 to 20 at a laptop's size: their corpus, and their models."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.prototype_mixer import tables
from benchmarks.prototype_mixer.tables import SOURCE
from prismlm.corpus import Corpus, sample_path
from prismlm.training import build_recipe
from prismlm.training.setup import prepare


def test_every_row_of_the_source_is_another_model_at_several_rates(tiny_corpus, tmp_path):
    rows = tables.ablations(tiny_corpus)
    named = {name for entries in SOURCE["ablations"].values() for name, _, _ in entries}
    assert {case.name for case in rows} == named
    assert len({json.dumps([case.settings]) for case in rows}) == len(rows) == 25
    wider = tables.contexts(tiny_corpus, [256, 2048])
    assert len(wider) == 2 * (4 + len(SOURCE["wider"]))
    for case in [*rows, *wider]:
        assert len(set(case.rates)) == len(case.rates) >= 3
        settings = case.settings | {"seed": 0, "out": str(tmp_path / "out")}
        recipe = build_recipe(settings)
        assert recipe.batch_size * recipe.data.length == tables.POSITIONS
        config = prepare(recipe).model.model.config
        # Of a laptop's size, whatever the recipe says of the source's.
        assert config.hidden_size == (320 if case.name.startswith("protot-wide") else 160)
        assert getattr(config, "value_width", 0) <= config.hidden_size


def test_documents_of_the_corpus_fill_every_row(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "EACH", 12)
    monkeypatch.setattr(tables, "LONG", 600)
    monkeypatch.setattr(tables, "READ", 1500)
    monkeypatch.setattr(tables, "ROW", 128)
    monkeypatch.setattr(tables, "VOCABULARY", 512)
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(sample_path(), texts / "long.parquet")
    # Of a file with fewer long ones none is taken.
    pq.write_table(pa.table({"text": ["x" * 700] * 11}), texts / "few.parquet")
    tables.build_corpus_of_rows(texts, tmp_path / "rows")
    corpus = Corpus.open(tmp_path / "rows")
    assert set(corpus.lengths.tolist()) == {128}
    assert 8 <= len(corpus) <= 12
    assert len(corpus.split("train"))
    assert not any("xxx" in corpus.text(n) for n in range(len(corpus)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "texts"]
