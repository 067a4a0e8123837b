"""ProtoT trained beside others: the runs of the script, and the page of what they wrote."""

import json
import math

import pytest
import torch

import prototype_mixer
import render_prototype_mixer
from prismlm.corpus import Corpus
from prismlm.training import build_recipe
from prismlm.training.setup import prepare
from prototype_mixer import CONTEXTS, IMPROVEMENTS, MODELS, Run


def recipe(run, corpus="c", steps=3):
    return prototype_mixer.recipe_of(run, corpus, 0, steps)


def test_every_run_is_a_recipe_and_another_one():
    runs = [run for part in ("compare", "improve", "rates") for run in prototype_mixer.runs(
        part, list(CONTEXTS)
    )]  # fmt: skip
    assert len({run.slug for run in runs}) == len(runs) == 16 + len(IMPROVEMENTS) * 4 + 32
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


def row(model, seed, perplexity, variant="", context=256, factor=1.0):
    return {
        "model": model,
        "variant": variant,
        "context": context,
        "factor": factor,
        "seed": seed,
        "settings": {"steps": 750, "corpus": "c"},
        "perplexity": perplexity,
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
        ]
    )
    assert "| LLaMA | 150.00 (100.00 to 200.00) | 1,234,567 |" in page
    # Seed 2 has no LLaMA beside it; the source's ratio at 256 is 90.5 / 78.7.
    assert "| ProtoT | 1.075, 1.050 to 1.100 (1.150) |" in page
    assert "| values twice as wide | 189.00 (0.900) | 1,234,567 |" in page
    assert "| ProtoT, 2 | 121.00 (one seed) |" in page
    assert "| LLaMA | 10 (19) |" in page


@pytest.mark.slow
def test_the_long_corpus_holds_long_documents(tmp_path):
    prototype_mixer.build_long_corpus(tmp_path / "long")
    corpus = Corpus.open(tmp_path / "long")
    assert len(corpus.doc_ids) == 437
    assert corpus.lengths.min() > 1500
    assert [path.name for path in tmp_path.iterdir()] == ["long"]
