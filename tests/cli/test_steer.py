"""The steer and generate commands, run as processes."""

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


def test_json_of_a_text(prism, tiny_model, lm):
    arguments = (*CLAMP, "--generate", 5, "--draws", 3, "--heldout", 500, "--json")
    result = prism("steer", tiny_model, TEXT, *arguments)
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    edit = prismlm.Clamp(7, 0.3)
    expected = steer(lm, TEXT, [edit], generate=5, draws=3).to_dict()
    expected = json.loads(json.dumps(expected))
    cost = value.pop("cost")
    assert value == expected | {
        "model": str(tiny_model),
        "lens": "sample",
        "edit": {
            "kind": "clamp",
            "prototype": 7,
            "fraction": 0.3,
        },
        "only": None,
        "cost_note": "",
    }
    assert all(set(token) == TOKEN for token in value["tokens"])
    assert cost["edited"] > cost["perplexity"] > 1
    assert cost["tokens"] == 500


def test_a_strength_that_is_not_given_is_found(prism, tiny_model, lm):
    result = prism("steer", tiny_model, TEXT, "--prototype", 7, "--heldout", 0, "--json")
    value = json.loads(result.stdout)
    edit = strongest(lm, TEXT, prismlm.Clamp(7, 1.0))
    assert value["edit"] == {"kind": "clamp", "prototype": 7, "fraction": edit.fraction}
    assert value["text"] == steer(lm, TEXT, [edit], draws=0).text


def test_a_file_of_prompts(prism, tiny_model, lm, tmp_path):
    prompts = [TEXT, "Once upon a time", "The theory of groups"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    arguments = ("--file", path, *CLAMP, "--draws", 2, "--heldout", 0)
    result = prism("steer", tiny_model, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
    edit = prismlm.Clamp(7, 0.3)
    expected = measure_effects(lm, prompts, [edit], draws=2).to_dict()
    assert {key: value[key] for key in expected} == json.loads(json.dumps(expected))
    assert value["cost"] is None


@pytest.mark.parametrize("only", ["residual", "prototypes"])
def test_a_part_alone(prism, tiny_model, tiny_corpus, lm, only):
    arguments = (TEXT, "--only", only, "--generate", 4, "--heldout", 500)
    result = prism("steer", tiny_model, *arguments, "--json")
    assert result.returncode == 0, result.stderr
    value = json.loads(result.stdout)
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
    result = prism("steer", directory, TEXT, *CLAMP, "--generate", 2)
    assert result.returncode == 0, result.stderr
    assert "cost on held-out text: there is no lens that names a corpus" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((TEXT,), "--prototype, --category and --document, got none"),
        ((TEXT, "--prototype", 7, "--edit", "scale"), "give --strength"),
        ((TEXT, "--prototype", 7, "--generate", 0), "found by writing"),
        (("--prototype", 7, "--file", "missing.txt"), "cannot be read"),
        ((TEXT, "--prototype", 192, "--strength", 0.5), "no prototype 192: expected 0 to 191"),
        ((TEXT, "--prototype", 7, "--strength", 1.5), "fraction of Clamp is 1.5"),
        ((TEXT, "--prototype", 7, "--strength", 0), "use Ablate"),
        ((TEXT, "--prototype", 7, "--strength", -1, "--edit", "scale"), "0 or more"),
        ((TEXT, "--prototype", 7, "--strength", 1, "--edit", "ablate"), "leave out --strength"),
        ((TEXT, "--prototype", 7, "--strength", 1, "--edit", "ablat"), "'ablat' is not one of"),
        ((TEXT, "--prototype", 7, "--category", "Law"), "--prototype and --category"),
        ((TEXT, "--category", "Law", "--strength", 1.1), "strength of Group is 1.1"),
        ((TEXT, "--category", "Law", "--strength", -0.5), "no categories yet"),
        ((TEXT, "--category", "Law", "--strength", 1, "--edit", "scale"), "is for --prototype"),
        ((TEXT, "--document", "nowhere", "--strength", 0.5), "no document 'nowhere'"),
        (("word " * 5000, *CLAMP), "shorten it"),
        (("", *CLAMP), "the text is empty"),
        (CLAMP, "got neither"),
        ((TEXT, "--only", "prototype"), "'prototype' is not one of 'prototypes'"),
        ((TEXT, "--only", "residual", "--strength", 1), "--strength belongs to an edit"),
        ((TEXT, "--only", "residual", *CLAMP), "leaves no prototypes"),
        ((TEXT, *CLAMP, "--file", "missing.txt"), "got both"),
        ((*CLAMP, "--file", "missing.txt"), "cannot be read"),
        ((TEXT, *CLAMP, "--heldout", -1), "'--heldout'"),
        ((TEXT, *CLAMP, "--corpus", "nowhere"), "not a directory"),
    ],
)
def test_steer_refuses(refused, tiny_model, arguments, words):
    assert words in refused("steer", tiny_model, *arguments)


def test_a_prototype_that_is_not_active_is_said_to_be_so_beside_those_that_are(
    prism, tiny_model, lm
):
    used = {use.id for step in lm.explain(TEXT) for use in step.prototypes}
    idle = next(i for i in range(lm.head.num_prototypes) if i not in used)
    arguments = ("--prototype", idle, "--edit", "ablate", "--heldout", 0)
    result = prism("steer", tiny_model, TEXT, *arguments)
    assert result.returncode == 0, result.stderr
    said = " ".join(result.stdout.split())
    assert "Nothing changed" in said
    assert any(f"#{one}" in said for one in used), said


def test_generate(prism, refused, tiny_model, lm):
    expected = lm.generate(TEXT, tokens=7)
    result = prism("generate", tiny_model, TEXT, "--tokens", 7)
    assert result.stdout == expected + "\n"
    sampled = prism("generate", tiny_model, TEXT, "--tokens", 7, "--temperature", 2, "--json")
    value = json.loads(sampled.stdout)
    assert value["text"] == lm.generate(TEXT, tokens=7, temperature=2.0)
    assert value["prompt"] == TEXT
    assert "generate at most 493" in refused("generate", tiny_model, TEXT, "--tokens", 100_000)
    assert "empty" in refused("generate", tiny_model, "")
    assert "not a directory" in refused("generate", "nowhere", TEXT)
