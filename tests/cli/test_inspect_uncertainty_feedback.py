"""prismlm inspect uncertainty-feedback shows what the report says."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.uncertainty_feedback import save_uncertainty
from prismlm.probes.uncertainty_feedback import (
    InspectOptions,
    corpus_sample,
    inspect_uncertainty_feedback,
)
from tests.helpers.feedback_families import attach_drawn
from tests.helpers.feedback_models import make_fed_gpt2, make_fed_protot
from tests.helpers.mixer_models import make_corpus

COMMAND = ("inspect", "uncertainty-feedback")
FAST = ("--write", 10, "--steps", 3, "--texts", 12, "--tokens", 32)
CHECKS = ("ablation", "prefill", "attention", "hedging", "mistakes", "probe")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("uncertainty")


@pytest.fixture(scope="module")
def corpus(place):
    return make_corpus(place)


def save(made, corpus, directory):
    model, feedback = made
    model.save_pretrained(directory)
    corpus.tokenizer.save_pretrained(directory)
    save_uncertainty(directory, feedback)
    noted = {"name": corpus.name, "fingerprint": corpus.fingerprint}
    recipe = {"corpus": str(corpus.path), "data": {"length": 48}}
    (directory / "training.json").write_text(json.dumps({"recipe": recipe, "corpus": noted}))
    return directory


@pytest.fixture(scope="module")
def gpt2(corpus, place):
    return save(make_fed_gpt2(len(corpus.tokenizer)), corpus, place / "gpt2")


@pytest.fixture(scope="module")
def protot(corpus, place):
    return save(make_fed_protot(len(corpus.tokenizer)), corpus, place / "protot")


def test_json_is_the_report(prism, gpt2, corpus):
    result = prism(*COMMAND, gpt2, *FAST, "--split", "all", "--seed", 3, "--json")
    assert result.returncode == 0, result.stderr
    for part in ("Own signal: ", "Token by token: ", "Reading attention: ", "Generating: "):
        assert part in result.stderr, part
    model, tokenizer = read_checkpoint(gpt2)
    report = inspect_uncertainty_feedback(
        model,
        tokenizer,
        corpus_sample(corpus, "all", texts=12, tokens=32, seed=3),
        name="gpt2",
        options=InspectOptions(tokens=10, window=3, steps=3, seed=3),
    )
    printed = json.loads(result.stdout)
    assert printed == json.loads(json.dumps(report.to_dict()))
    assert all(printed[check]["rows"] for check in CHECKS)
    assert printed["left_out"] == {}
    assert printed["options"]["signal"] == {"kind": "passes", "passes": 2}
    assert len(printed["attention"]["rows"]) == 2
    assert len(printed["probe"]["rows"]) == 3
    interval = printed["ablation"]["rows"][1]["change"]
    assert interval["low"] <= interval["value"] <= interval["high"]


def test_a_model_without_attention_has_a_reason_in_its_place(prism, protot):
    result = prism(*COMMAND, protot, *FAST, "--split", "all")
    assert result.returncode == 0, result.stderr
    assert "No attention: a model of type 'prismlm_protot' has no attention heads" in result.stdout
    asked = ("--check", "attention", "--check", "probe", "--signal", "recursion", "--json")
    found = json.loads(prism(*COMMAND, protot, *FAST, "--split", "all", *asked).stdout)
    assert {check for check in CHECKS if found.get(check)} == {"probe"}
    assert "no attention heads" in found["left_out"]["attention"]
    assert found["options"]["signal"]["kind"] == "recursion"


def test_texts_from_files_and_from_the_command_line(prism, gpt2, corpus, tmp_path):
    texts = [f"Old maps carries stone number {n} to the sea." for n in range(6)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"words": text}) + "\n" for text in texts))
    asked = ("--check", "ablation", "--json")
    found = json.loads(prism(*COMMAND, gpt2, path, "--text-column", "words", *asked).stdout)
    assert (found["sample"], found["texts"]) == ("texts.jsonl", 6)
    given = [part for text in texts for part in ("--text", text)]
    other = json.loads(prism(*COMMAND, gpt2, *given, *asked).stdout)
    assert other["sample"] == "--text"
    assert other["ablation"] == found["ablation"]


def test_what_cannot_be_read_is_refused(refused, gpt2, corpus, place, tmp_path):
    plain = place / "plain"
    model, feedback = make_fed_gpt2(len(corpus.tokenizer))
    feedback.detach()
    model.save_pretrained(plain)
    corpus.tokenizer.save_pretrained(plain)
    assert "uncertainty_feedback: {enabled: true" in refused(
        *COMMAND, plain, "--corpus", corpus.path
    )
    assert "Did you mean 'probe'" in refused(*COMMAND, gpt2, *FAST, "--check", "prob")
    one = refused(*COMMAND, gpt2, "--text", "The river carries stones to the sea.")
    assert "at least 4 texts" in one
    assert "has 1" in one
    short = refused(*COMMAND, gpt2, "--text", "a", "--check", "ablation")
    assert "the first token of a text is not predicted" in short
    assert "from 2 on" in refused(*COMMAND, gpt2, "--tokens", 1)
    assert "texts is 0" in refused(*COMMAND, gpt2, "--texts", 0)
    assert "embeddings of 64 positions" in refused(
        *COMMAND, gpt2, "--text", "The river carries stones. " * 40, "--tokens", 200
    )
    assert "give one of them" in refused(*COMMAND, gpt2, "--text", "a", "--corpus", corpus.path)
    assert "not one of 'passes', 'recursion'" in refused(*COMMAND, gpt2, "--signal", "magic")
    assert "passes is 0" in refused(*COMMAND, gpt2, "--passes", 0)
    assert "'--seed'" in refused(*COMMAND, gpt2, "--seed", -1)
    for temperature in ("nan", "inf", -0.1):
        message = refused(*COMMAND, gpt2, "--temperature", temperature)
        assert f"temperature is {temperature}: expected" in message
    assert "'some'" in refused(*COMMAND, gpt2, "--split", "some")
    assert "expected 1 to 9" in refused(
        *COMMAND, gpt2, *FAST, "--split", "all", "--check", "hedging", "--steps", 10
    )


def test_texts_of_another_vocabulary_are_refused(refused, gpt2, corpus, place, tmp_path):
    # A tokenizer with more tokens than the model has.
    other = AutoModelForCausalLM.from_config(read_checkpoint(gpt2)[0].config)
    other.resize_token_embeddings(40)

    torch.manual_seed(0)
    directory = save((other, attach_drawn(other, 64)), corpus, place / "small")
    message = refused(*COMMAND, directory, *FAST, "--split", "all", "--check", "ablation")
    assert "encoded with another tokenizer" in message
    assert "the model has 40" in message
