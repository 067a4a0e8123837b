"""Tables 1 and 15 to 20 at a laptop's size: their corpus, their runs, and what is said of them."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.prototype_mixer import tables
from benchmarks.prototype_mixer.source_tables import ABLATIONS, CLAIMS, WIDER
from benchmarks.prototype_mixer.table_sections import best_runs, verdict
from prismlm.corpus import Corpus, sample_path
from prismlm.training import build_recipe
from prismlm.training.setup import prepare


def test_every_row_of_the_source_is_another_model_at_several_rates(tiny_corpus, tmp_path):
    rows = tables.ablations(tiny_corpus)
    named = {name for entries in ABLATIONS.values() for name, _, _ in entries}
    assert {case.name for case in rows} == named
    assert named >= {name for claim in CLAIMS for name in (claim.first, claim.second)}
    assert len({json.dumps([case.settings]) for case in rows}) == len(rows) == 28
    wider = tables.contexts(tiny_corpus, [256, 2048])
    assert len(wider) == 2 * (4 + len(WIDER))
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


def test_other_seeds_are_run_at_the_rate_that_was_best_with_the_first(
    tiny_corpus, tmp_path, monkeypatch, capsys
):
    case = next(one for one in tables.ablations(tiny_corpus) if one.name == "protot")
    case.settings.update(steps=4, batch_size=2, precision="float32")
    case.settings["data"].update(length=32, documents=8)
    case.settings["evaluation"] = {"every": 2, "tokens": 500, "final_tokens": 500}
    with pytest.raises(SystemExit, match="lacks runs of protot with seed 0"):
        tables.run(case, 1, tmp_path / "work", tmp_path / "ablations")
    case = case._replace(rates=(1e-6, 1e-5, 5e-3))
    tables.run(case, 0, tmp_path / "work", tmp_path / "ablations")
    tables.run(case, 1, tmp_path / "work", tmp_path / "ablations")
    files = sorted(path.name for path in (tmp_path / "ablations").iterdir())
    # Four steps of a rate near 0 leave the model where it was.
    assert files == [f"protot-{run}.json" for run in ("0.005-0", "0.005-1", "1e-05-0", "1e-06-0")]
    assert not any((tmp_path / "work").iterdir())
    capsys.readouterr()
    tables.run(case, 1, tmp_path / "work", tmp_path / "ablations")
    assert "protot-0.005-1.json is there" in capsys.readouterr().out
    # A case that takes another's best rate is run at that and half of it, and then at its own best.
    longer = case._replace(name="longer")
    with pytest.raises(SystemExit, match="lacks runs of longer with seed 0"):
        tables.run(longer, 1, tmp_path / "work", tmp_path / "ablations")
    tables.run(longer, 0, tmp_path / "work", tmp_path / "ablations")
    halves = ["longer-0.0025-0.json", "longer-0.005-0.json"]
    assert sorted(path.name for path in (tmp_path / "ablations").glob("longer-*")) == halves
    edit = tmp_path / "ablations" / halves[0]
    edit.write_text(json.dumps(json.loads(edit.read_text()) | {"ce": 0.5}))
    assert tables.rates_of(longer, 1, tmp_path / "ablations") == (0.0025,)
    both = best_runs(tmp_path / "ablations")
    assert [row["rate"] for row in both["longer"]] == [0.0025]
    found = both["protot"]
    assert [(row["rate"], row["seed"]) for row in found] == [(0.005, 0), (0.005, 1)]
    # The last evaluation is the run's own figure.
    assert [point["step"] for point in found[0]["curve"]] == [2]
    assert [one["step"] for one in found[0]["gates"]] == [2, 4]
    assert 0 < found[0]["gates"][0]["write_top_share"] < 1


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([], "not run"),
        ([1.1], "points the other way, one seed"),
        ([0.7, 0.8], "**shown**"),
        ([1.1, 1.2], "**the opposite**"),
        ([0.9, 1.1], "**not shown**"),
    ],
)
def test_a_ratio_is_shown_where_every_seed_is_below_1(ratios, said):
    assert verdict(ratios).startswith(said)
