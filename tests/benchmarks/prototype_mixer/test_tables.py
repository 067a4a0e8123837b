"""Tables 1 and 15 to 20 at a laptop's size: their corpus, their runs, and what is said of them."""

import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.prototype_mixer import tables
from benchmarks.prototype_mixer.source_tables import ABLATIONS, CLAIMS, WIDER
from benchmarks.prototype_mixer.table_sections import best_runs, sections, verdict
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


def write(folder, row, seed, perplexity, rate=0.1, **more):
    folder.mkdir(parents=True, exist_ok=True)
    run = {
        "row": row,
        "model": row.partition("-")[0],
        "rate": rate,
        "seed": seed,
        "ce": math.log(perplexity),
        "tokens": 1_500_000,
        "parameters": 1234,
        "settings": {"steps": 7},
        "environment": {"date": "2026-01-01"},
    }
    (folder / f"{row}-{rate}-{seed}.json").write_text(json.dumps(run | more))


def write_contexts(contexts):
    for seed, protot, llama in ((0, 110, 100), (1, 90, 100)):
        write(contexts, "protot-at-256", seed, protot)
        write(contexts, "llama-at-256", seed, llama)
        write(contexts, "protot-at-1024", seed, 120, rate_of="protot-at-256")
        write(contexts, "protot-at-2048", seed, 130, rate_of="protot-at-256")
        write(contexts, "llama-at-2048", seed, 100, rate_of="llama-at-256")
    # The worse one of two.
    for row, rate in (("protot-at-1024", 0.05), ("protot-at-2048", 0.05), ("llama-at-2048", 0.2)):
        write(contexts, row, 0, 140, rate=rate, rate_of=f"{row.split('-')[0]}-at-256")
    # The worse rates of seed 0 are passed over.
    for path in sorted(contexts.glob("*-at-256-*-0.json")):
        worse = json.loads(path.read_text())
        for rate in (0.2, 0.4):
            write(contexts, worse["row"], 0, 2 * math.exp(worse["ce"]), rate=rate)
    # Of this, which has another's best rate and no other yet, the best is not known.
    write(contexts, "protot-at-512", 0, 1.0, rate_of="protot-at-256")


def write_ablations(ablations):
    curve = [{"ce": math.log(60)}, {"ce": math.log(50)}, {"ce": math.log(70)}]
    write(ablations, "protot", 0, 99, curve=curve, gates=[{
        "alpha": 0.5, "write_gini": 0.25, "write_top_share": 0.125
    }])  # fmt: skip
    write(ablations, "table-15-no-convolution", 0, 99, curve=[{"ce": math.log(60)}],
        model="protot")  # fmt: skip
    for row, rates in (("protot", (0.05, 0.2)), ("table-15-no-convolution", (0.2, 0.4))):
        for rate in rates:
            write(ablations, row, 0, 500, rate=rate)
    write(ablations, "protot", 1, 52)
    write(ablations, "table-15-no-convolution", 1, 67.6, model="protot")
    # Of this the best rate is not known yet.
    write(ablations, "table-16-kernel-4", 0, 10)


def test_sections_by_hand(tmp_path):
    write_contexts(tmp_path / "contexts")
    write_ablations(tmp_path / "ablations")
    page = "\n".join(sections(tmp_path))
    assert (
        "| LLaMA | **0.1: 100.0**, 0.2: 200.0, 0.4: 200.0; at the edge | – | – | "
        "**0.1: 100.0**, 0.2: 140.0; at the edge |\n"
    ) in page
    assert (
        "0.4: 220.0; at the edge | **0.1: 1.0**; at the edge | 0.05: 140.0, **0.1: 120.0** |"
        in page
    )
    assert "| ProtoT | 1,234 | 100.0 (90.0 to 110.0) | – | 120.0 (120.0 to 120.0) |" in page
    assert (
        "LLaMA's: 1.00 (0.90 to 1.10) at 256 (the source: 1.15), 1.30 (1.30 to 1.30) at 2," in page
    )
    assert "Not run yet at the best rate: LLaMA at 512, LLaMA at 1,024, Mamba 2 at 256, " in page
    assert "| ProtoT | 1.000 (0.900 to 1.100) (1.150) | – (1.205) |" in page
    # 1.1 / 1.3 and 0.9 / 1.3.
    assert (
        "(its ratio at 256 over that at 2,048 is below 1; the source: 0.893): **shown**: " in page
    )
    assert "**shown**: 0.769 (0.692 to 0.846), 2 seeds" in page
    assert (
        "- ProtoT, 1,024 tokens are better than 2,048 (the source: 0.983): **shown**: 0.9" in page
    )
    assert "| all of it | 0.1 | 50.0 |  | 133.3 (1.000) | 0.500 | 0.250 | 0.125 |" in page
    assert (
        "| no convolution | 0.1, at the edge | 60.0 | 1.250 (1.200 to 1.300) | 145.7 (1.093) | – |"
    ) in page
    assert "**From seed to seed a ratio differs by up to 0.10**" in page
    # 50 / 60 and 52 / 67.6.
    assert "- The convolution lowers perplexity: **shown**: 0.801 (0.769 to 0.833), 2 se" in page
    assert "26 rows are not run yet and left out." in page
    assert "Table 19" not in page
    assert "32 channels are better" not in page
    assert verdict([1.1]) == "points the other way, one seed: 1.100"
    assert verdict([0.9, 1.1]).startswith("**not shown**")
    assert sections(tmp_path / "none") == []
