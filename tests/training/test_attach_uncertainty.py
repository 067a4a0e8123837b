"""A table of uncertainty codes trained for a model that exists, by prismlm attach --uncertainty."""

import json
import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import prismlm
from prismlm.cli.app import app
from prismlm.models.sidecar import HEAD_FILE, META_FILE
from prismlm.models.uncertainty_feedback import uncertainty_of

SETTINGS = (
    "--prototypes 48 --prototypes-per-token 4 --epochs 1 --batch 128 --window 64 --contexts 4 "
    "--uncertainty --uncertainty-epochs 0.5"
)


def run(*words):
    done = CliRunner().invoke(app, ["attach", *map(str, words), *SETTINGS.split()])
    return done.exit_code, done.output, done.stdout


def test_a_table_is_trained_and_its_effect_is_reported(tiny_model, short_corpus, tmp_path):
    base, out = tmp_path / "plain", tmp_path / "fed"
    shutil.copytree(tiny_model, base, ignore=shutil.ignore_patterns("lens", META_FILE, HEAD_FILE))
    arguments = (base, "--corpus", short_corpus, "--out", out)
    code, output, stdout = run(*arguments, "--json")
    assert code == 0, output
    effect = json.loads(stdout)["uncertainty"]
    assert effect["tokens"] > 100
    # With nothing fed it is the base model; with its table, what the head is judged by.
    lm = prismlm.load(out)
    feedback = uncertainty_of(lm.model)
    assert feedback.embedding.weight.shape[0] == 64
    assert feedback.embedding.weight.any()
    assert effect["ce"] != effect["ce_without"]
    assert json.loads(stdout)["quality"]["ce"] == pytest.approx(effect["ce"], rel=1e-4)
    assert os.path.samefile(base / "model.safetensors", out / "model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(20)[None]
    none = torch.full_like(ids, -1)
    with torch.no_grad():
        bare = lm.model(ids, uncertainty_codes=none, use_cache=False).logits
        torch.testing.assert_close(bare, plain(ids).logits)
    assert len(lm.explain("The river", generate=3)) > 3
    code, output, _ = run(*arguments)
    assert code == 0, output
    assert "uncertainty fed back" in output
    code, output, _ = run(out, "--corpus", short_corpus, "--out", tmp_path / "again")
    assert code != 0
    assert "has a table of uncertainty codes already" in " ".join(output.split())
