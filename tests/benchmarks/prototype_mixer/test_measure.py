"""ProtoT trained beside others: the runs of the script, and the page of what they wrote."""

import json
import math

import pytest
import torch

from benchmarks.prototype_mixer import measure as prototype_mixer
from benchmarks.prototype_mixer import render as render_prototype_mixer
from benchmarks.prototype_mixer.measure import CONTEXTS, IMPROVEMENTS, MODELS, Run
from prismlm.corpus import Corpus
from prismlm.training import build_recipe
from prismlm.training.setup import prepare


def recipe(run, corpus="c"):
    return prototype_mixer.recipe_of(run._replace(steps=3), corpus, 0)


def test_every_run_is_a_recipe_and_another_one():
    runs = [run for part in prototype_mixer.PARTS[1:] for run in prototype_mixer.runs(
        part, list(CONTEXTS)
    )]  # fmt: skip
    assert len({run.slug for run in runs}) == len(runs) == 16 + len(IMPROVEMENTS) * 4 + 32 + 12
    models = [json.dumps(recipe(run)["model"]) for run in prototype_mixer.runs("improve", [256])]
    default = json.dumps(recipe(Run("compare", "protot", "", 256))["model"])
    assert len({default, *models}) == len(models) + 1
    for run in runs:
        if run.context in (256, 2048):
            built = build_recipe(recipe(run) | {"out": "o"})
            assert built.batch_size * built.data.length == prototype_mixer.POSITIONS


def test_all_models_see_the_same_rows(tiny_corpus, tmp_path):
    seen = []
    for name in MODELS:
        settings = recipe(Run("compare", name, "", 64), str(tiny_corpus)) | {"out": str(tmp_path)}
        rows = prepare(build_recipe(settings)).rows
        assert not rows.shared_rows
        seen.append(torch.stack([rows[i]["input_ids"] for i in range(0, len(rows), 7)]))
    for rows in seen[1:]:
        assert torch.equal(rows, seen[0])


def test_a_run_is_measured_once_and_goes_on_where_it_was_cut(
    tiny_corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(prototype_mixer, "POSITIONS", 256)
    command = ["prototype_mixer.py", str(tiny_corpus), "compare", "--steps", "3"]
    command += ["--contexts", "32", "--threads", "1", "--only", "protot", "llama"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "prototype_mixer")]
    monkeypatch.setattr("sys.argv", command)
    prototype_mixer.main()
    files = sorted((tmp_path / "prototype_mixer").iterdir())
    assert [path.name for path in files] == ["compare-llama-32-0.json", "compare-protot-32-0.json"]
    row = json.loads(files[1].read_text(encoding="utf-8"))
    assert row["perplexity"] == pytest.approx(math.exp(row["ce"]))
    # Hardly trained, it is not far from guessing among 2,048 tokens.
    assert 200 < row["perplexity"] < 3000
    assert 0 < row["tokens"] <= 3 * 256
    assert not row["resumed"]
    assert not any((tmp_path / "work").iterdir())

    before = files[1].stat().st_mtime_ns
    files[0].unlink()
    (tmp_path / "work" / "compare-llama-32-0").mkdir()
    capsys.readouterr()
    prototype_mixer.main()
    assert files[1].stat().st_mtime_ns == before
    assert "compare-protot-32-0.json is there" in capsys.readouterr().out
    assert json.loads(files[0].read_text(encoding="utf-8"))["resumed"]

    monkeypatch.setattr("sys.argv", ["render", "--results", str(tmp_path)])
    assert render_prototype_mixer.main() == 0
    page = (tmp_path / "prototype_mixer.md").read_text(encoding="utf-8")
    cell = f"{row['perplexity']:.2f} (one seed)"
    assert f"| ProtoT | {cell} | {row['parameters']:,} |" in page
    monkeypatch.setattr("sys.argv", ["render", "--check", "--results", str(tmp_path)])
    assert render_prototype_mixer.main() == 0


def row(model, seed, perplexity, variant="", context=256, factor=1.0, steps=750):
    return {
        "model": model,
        "variant": variant,
        "context": context,
        "factor": factor,
        "seed": seed,
        "settings": {
            "steps": steps,
            "corpus": "c",
            "model": {"preset": f"{model}-laptop"},
            "data": {"packing": "padded"},
            "optimizer": {"warmup": 0.1},
            "batch_size": 2048 // context,
        },
        "perplexity": perplexity,
        "tokens": 1_500_000 - 200 * context + seed,
        "parameters": 1234567,
        "seconds": 10.0,
        "processor_seconds": 19.0,
        "resumed": seed == 1,
        "environment": {"date": "2026-01-01"},
    }


def test_the_page_by_hand():
    page = render_prototype_mixer.render(
        [
            row("llama", 0, 100.0),
            row("llama", 1, 200.0),
            row("protot", 0, 110.0),
            row("protot", 1, 210.0),
            row("protot", 2, 400.0),
            row("protot", 1, 189.0, "values twice as wide"),
            row("protot", 0, 121.0, factor=2.0),
            row("llama", 0, 80.0, factor=2.0),
            row("llama", 1, 90.0, factor=2.0),
            row("llama", 0, 10.0, factor=4.0),
            row("llama", 0, 50.0, steps=3000),
            row("protot", 0, 60.0, steps=3000),
        ]
    )
    assert "| LLaMA | 150.00 (100.00 to 200.00) | 1,234,567 |" in page
    # Seed 2 has no LLaMA beside it; the source's ratio at 256 is 90.5 / 78.7.
    assert "| ProtoT | 1.075, 1.050 to 1.100 (1.150) |" in page
    assert "| values twice as wide | 189.00 (0.900) | 1 | 1,234,567 |" in page
    assert "| ProtoT, 2 | 121.00 (one seed) |" in page
    assert "| LLaMA | 10 (19) |" in page
    # Of the rates with the most seeds: twice the source's for LLaMA, the source's for ProtoT.
    best = page.split("## By context, at the best of the rates run with the most seeds\n")[1]
    assert "passed over: LLaMA at × 4 has 10.00 (one seed), below its 85.00 at × 2; P" in best
    assert "chosen by its perplexity on the held-out text that is reported here" in best
    assert "| LLaMA, rate × 2 | 85.00 (80.00 to 90.00) |" in best
    assert "| ProtoT | 1.854, 1.375 to 2.333 (1.150) |" in best
    assert "| ProtoT | 256 | 3,000 | 60.00 (one seed) | 1.200 |" in page
    assert "1.075, 1.050 to 1.100 (2 seeds) at the source's rates, 750 steps of rows of" in page
    assert "; 1.854, 1.375 to 2.333 (2 seeds) at the best of the rates run with the" in page
    assert "1.200 (one seed) of longer training, 3000 steps of rows of 256. The source" in page
    assert f"1 of the {len(IMPROVEMENTS)} variants" in page
    assert "over 10% of the steps (the source: 2%); dropout is none (the source: 0.1)" in page
    # One context, so there are none to compare; and no higher rate of ProtoT was the best.
    assert "must not be compared" not in page
    assert "cannot be told" not in page


def test_variants_stand_beside_a_higher_rate_and_contexts_apart():
    page = render_prototype_mixer.render(
        [
            row("protot", 0, 120.0),
            row("protot", 1, 130.0),
            row("protot", 0, 100.0, factor=4.0),
            row("protot", 1, 104.0, factor=4.0),
            row("protot", 0, 90.0, factor=8.0),
            row("protot", 0, 108.0, "64 channels"),
            row("protot", 0, 96.0, "4 groups"),
            row("mamba", 0, 80.0),
            row("mamba", 0, 70.0, context=2048),
        ]
    )
    assert "The default at × 4 has 102.00 at 256 (2 seeds), below 1 of 2 variants there." in page
    assert "a variant's gain cannot be told from that of a higher rate" in page
    # 100 / 120 and 104 / 130.
    assert "| default, rate × 4 | 102.00 (0.817, 0.800 to 0.833) | – | 0, 1 |" in page
    assert "ProtoT at × 8 has 90.00 (one seed), below its 102.00 at × 4" in page
    assert "`mamba2` of 5 layers beside models of 3" in page
    # Tokens of seeds 0 and 1 at 256: 1,448,800 and one more.
    assert "1,448,800 tokens in 750 steps of 8 rows at 256 against" in page
    assert "1,090,400 tokens in 750 steps of 1 row at 2,048 (mean over seeds)" in page


@pytest.mark.slow
def test_the_long_corpus_holds_long_documents(tmp_path):
    prototype_mixer.build_long_corpus(tmp_path / "long")
    corpus = Corpus.open(tmp_path / "long")
    assert len(corpus.doc_ids) == 437
    assert corpus.lengths.min() > 1500
    assert [path.name for path in tmp_path.iterdir()] == ["long"]
