"""prismlm eval robustness and clamping."""

import json

import pytest

from tests.helpers.studied import write_pairs


def test_models_are_compared_and_the_figures_kept(prism, studied, tmp_path):
    pairs, out = studied / "pairs.parquet", tmp_path / "found.json"
    models = [studied / kind for kind in ("protot", "llama", "gpt2")]
    done = prism("eval", "robustness", *models, "--pairs", pairs, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(out.read_text())
    assert [model["name"] for model in found["models"]] == ["protot", "llama", "gpt2"]
    assert found["slices"][3]["pairs"] == 7
    shown = prism("eval", "robustness", *models, "--pairs", pairs, "--limit", 3, "--entropy", 2)
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(("kind", "routing"), [("protot", "channels"), ("gpt2", "attention")])
def test_routing_is_clamped(prism, studied, tmp_path, kind, routing):
    pairs, out = studied / "pairs.parquet", tmp_path / "found.json"
    done = prism("eval", "clamping", studied / kind, "--pairs", pairs, "--out", out)
    assert done.returncode == 0, done.stderr
    assert f"PMR: {kind}, {routing} clamped" in done.stdout
    found = json.loads(out.read_text())
    assert found["slices"][0]["clamped"]["pairs"] == 6
    again = prism("eval", "clamping", studied / kind, "--pairs", pairs, "--json")
    assert json.loads(again.stdout) == found


@pytest.mark.parametrize(
    ("study", "kind", "arguments", "words"),
    [
        ("clamping", "mamba", (), "no routing that could be clamped"),
        ("robustness", "llama", ("--limit", 0), "'--limit'"),
        ("robustness", "llama", ("--entropy", "nan"), "--entropy"),
        ("robustness", "nowhere", (), "is not a directory"),
    ],
)
def test_bad_input_is_refused(refused, studied, study, kind, arguments, words):
    message = refused(
        "eval", study, studied / kind, "--pairs", studied / "pairs.parquet", *arguments
    )
    assert words in message


def test_pairs_that_are_none_are_refused(refused, studied, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.parquet", [("tipo", "a", "b")])
    message = refused("eval", "robustness", studied / "llama", "--pairs", pairs)
    assert "'tipo'" in message
