"""prismlm steer and generate."""

import json
import shutil
from dataclasses import asdict

import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.interventions.steering import steer, strongest
from prismlm.interventions.steering_effects import measure_effects, perplexity_cost

TEXT = "The patient was given a dose of the drug, and the court"
TOKEN = {
    "position", "token", "token_id", "before", "after", "control", "leading_before",
    "leading_after", "changed",
}  # fmt: skip
CLAMP = ("--prototype", 7, "--strength", 0.3)


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


def test_json_of_a_text(document, tiny_model, lm):
    sizes = ("--generate", 5, "--draws", 3, "--heldout", 500)
    value = document("steer", tiny_model, TEXT, *CLAMP, *sizes)
    expected = asdict(steer(lm, TEXT, [prismlm.Clamp(7, 0.3)], generate=5, draws=3))
    cost = value.pop("cost")
    assert value == json.loads(json.dumps(expected)) | {
        "model": str(tiny_model),
        "lens": "sample",
        "edit": {"kind": "clamp", "prototype": 7, "fraction": 0.3},
        "only": None,
        "cost_note": "",
    }
    assert all(set(token) == TOKEN for token in value["tokens"])
    assert cost["edited"] > cost["perplexity"] > 1
    assert 500 <= cost["tokens"] < 1000


def test_a_strength_is_searched_by_default(document, tiny_model, lm):
    value = document("steer", tiny_model, TEXT, "--prototype", 7, "--heldout", 0)
    edit = strongest(lm, TEXT, prismlm.Clamp(7, 1.0))
    assert value["edit"] == {"kind": "clamp", "prototype": 7, "fraction": edit.fraction}
    assert value["text"] == steer(lm, TEXT, [edit], draws=0).text


def test_a_file_of_prompts(prism, document, tiny_model, lm, tmp_path):
    prompts = [TEXT, "Once upon a time", "The theory of groups"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    command = ("steer", tiny_model, "--file", path, *CLAMP, "--draws", 2, "--heldout", 0)
    value = document(*command)
    expected = measure_effects(lm, prompts, [prismlm.Clamp(7, 0.3)], draws=2)
    assert {key: value[key] for key in expected} == json.loads(json.dumps(expected))
    assert value["cost"] is None
    shown = prism(*command).stdout
    effect = expected["measures"]["divergence"]
    for figure in (effect["edit"], *effect["difference_interval"], effect["control"]):
        assert f"{figure:+.3f}".replace("-", "−") in shown


@pytest.mark.parametrize("only", ["residual", "prototypes"])
def test_a_part_alone(document, tiny_model, tiny_corpus, lm, only):
    options = ("--only", only, "--generate", 4, "--heldout", 500)
    value = document("steer", tiny_model, TEXT, *options)
    cost = perplexity_cost(lm, Corpus.open(tiny_corpus), [], only=only, tokens=500)
    assert (value["edit"], value["only"], value["cost"]) == (None, only, asdict(cost))
    with lm.edit(only=only):
        assert value["text"] == lm.generate(TEXT, tokens=4)
    assert value["unedited"] == lm.generate(TEXT, tokens=4) != value["text"]
    assert all(token["control"] is None for token in value["tokens"])
    assert (value["tokens"][0]["leading_after"] is None) == (only == "residual")


def test_the_cost_needs_a_corpus(prism, tiny_model, tmp_path):
    directory = shutil.copytree(tiny_model, tmp_path / "copy")
    shutil.rmtree(directory / "lens")
    shown = prism("steer", directory, TEXT, *CLAMP, "--generate", 2).stdout
    assert "cost on held-out text: there is no lens that names a corpus" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TEXT,), "--category and --controller, got none"),
        ((TEXT, "--prototype", 7, "--edit", "scale"), "give --strength"),
        ((TEXT, "--prototype", 7, "--generate", 0), "give a strength"),
        (("--prototype", 7, "--file", "missing.txt"), "cannot be read"),
        ((TEXT, "--prototype", 192, "--strength", 0.5), "no prototype 192: expected 0 to 191"),
        ((TEXT, "--prototype", 7, "--strength", 1.5), "fraction of Clamp is 1.5"),
        ((TEXT, "--prototype", 7, "--strength", 1, "--edit", "ablate"), "leave out --strength"),
        ((TEXT, "--prototype", 7, "--strength", 1, "--edit", "ablat"), "'ablat' is not one of"),
        ((TEXT, "--prototype", 7, "--category", "Law"), "--prototype and --category"),
        ((TEXT, "--category", "Law", "--strength", 1.1), "strength of Group is 1.1"),
        ((TEXT, "--category", "Law", "--strength", -0.5), "no categories yet"),
        ((TEXT, "--category", "Law", "--strength", 1, "--edit", "scale"), "is for --prototype"),
        (("", *CLAMP), "the text is empty"),
        (CLAMP, "got neither"),
        ((TEXT, "--only", "residual", "--strength", 1), "--strength belongs to an edit"),
        ((TEXT, "--only", "residual", *CLAMP), "leaves no prototypes"),
        ((TEXT, *CLAMP, "--file", "missing.txt"), "got both"),
        ((*CLAMP, "--file", "rows.jsonl"), "holds records: give a text file"),
        ((*CLAMP, "--file", "a.txt", "--generate", 20), "leave out --generate and --temperature"),
        ((TEXT, *CLAMP, "--corpus", "nowhere"), "not a directory"),
    ],
)
def test_steer_refuses(refused, tiny_model, arguments, words):
    assert words in refused("steer", tiny_model, *arguments)


def test_an_inactive_prototype_is_reported_with_active_ones(prism, tiny_model, lm):
    active = {use.id for step in lm.explain(TEXT) for use in step.prototypes}
    idle = next(i for i in range(lm.head.num_prototypes) if i not in active)
    options = ("--prototype", idle, "--edit", "ablate", "--heldout", 0)
    words = " ".join(prism("steer", tiny_model, TEXT, *options).stdout.split())
    assert "Nothing changed" in words
    assert any(f"#{number}" in words for number in active), words


def test_generate(prism, document, refused, tiny_model, lm):
    command = ("generate", tiny_model, TEXT, "--tokens", 7)
    assert prism(*command).stdout == lm.generate(TEXT, tokens=7) + "\n"
    value = document(*command, "--temperature", 2)
    assert value["text"] == lm.generate(TEXT, tokens=7, temperature=2.0)
    assert value["prompt"] == TEXT
    assert "generate at most 493" in refused("generate", tiny_model, TEXT, "--tokens", 100_000)
    assert "empty" in refused("generate", tiny_model, "")
    assert "not a directory" in refused("generate", "nowhere", TEXT)
