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
    for part in ("Own signal: ", "Token by token: ", "Reading attention: ", "Generating: "):
        assert part in result.stderr, part
    sample = corpus_sample(corpus, "all", texts=12, tokens=32, seed=3)
    options = InspectOptions(tokens=10, window=3, steps=3, seed=3)
    model = read_checkpoint(gpt2)[:2]
    report = inspect_uncertainty_feedback(*model, sample, name="gpt2", options=options)
    value = json.loads(result.stdout)
    assert value == json.loads(json.dumps(report.to_dict()))
    assert all(value[check]["rows"] for check in CHECKS)
    assert value["left_out"] == {}
    assert value["options"]["signal"] == {"kind": "passes", "passes": 2}
    assert len(value["attention"]["rows"]) == 2
    assert len(value["probe"]["rows"]) == 3
    interval = value["ablation"]["rows"][1]["change"]
    assert interval["low"] <= interval["value"] <= interval["high"]


def test_a_check_that_is_left_out_has_a_reason(prism, document, protot):
    command = (*COMMAND, protot, *FAST, "--split", "all")
    reason = "No attention: a model of type 'prismlm_protot' has no attention heads"
    assert reason in prism(*command).stdout
    checks = ("--check", "attention", "--check", "probe", "--signal", "recursion")
    value = document(*command, *checks)
    assert {check for check in CHECKS if value.get(check)} == {"probe"}
    assert "no attention heads" in value["left_out"]["attention"]
    assert value["options"]["signal"]["kind"] == "recursion"


def test_texts_from_files_and_from_the_command_line(document, gpt2, tmp_path):
    texts = [f"Old maps carries stone number {n} to the sea." for n in range(6)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"words": text}) + "\n" for text in texts))
    command = (*COMMAND, gpt2, "--check", "ablation")
    value = document(*command, path, "--text-column", "words")
    assert (value["sample"], value["texts"]) == ("texts.jsonl", 6)
    other = document(*command, *(part for text in texts for part in ("--text", text)))
    assert other["sample"] == "--text"
    assert other["ablation"] == value["ablation"]


def test_a_model_without_feedback_is_refused(refused, corpus, place):
    plain = place / "plain"
    model, feedback = make_fed_gpt2(len(corpus.tokenizer))
    feedback.detach()
    model.save_pretrained(plain)
    corpus.tokenizer.save_pretrained(plain)
    message = refused(*COMMAND, plain, "--corpus", corpus.path)
    assert "uncertainty_feedback: {enabled: true" in message


SHORT = "The river carries stones to the sea. "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*FAST, "--check", "prob"), "Did you mean 'probe'"),
        (("--text", SHORT), "at least 4 texts"),
        (("--text", "a", "--check", "ablation"), "the first token of a text is not predicted"),
        (("--tokens", 1), "from 2 on"),
        (("--texts", 0), "texts is 0"),
        (("--text", SHORT * 40, "--tokens", 200), "embeddings of 64 positions"),
        (("--text", "a", "--corpus", "corpus"), "give one of them"),
        (("--signal", "magic"), "not one of 'passes', 'recursion'"),
        (("--passes", 0), "passes is 0"),
        (("--seed", -1), "'--seed'"),
        (("--temperature", "nan"), "temperature is nan: expected"),
        (("--temperature", -0.1), "temperature is -0.1: expected"),
        (("--split", "some"), "'some'"),
        ((*FAST, "--split", "all", "--check", "hedging", "--steps", 10), "expected 1 to 9"),
    ],
)
def test_bad_input_is_refused(refused, gpt2, arguments, words):
    assert words in refused(*COMMAND, gpt2, *arguments)


def test_texts_of_another_vocabulary_are_refused(refused, gpt2, corpus, place, tmp_path):
    # A tokenizer with more tokens than the model has.
    other = AutoModelForCausalLM.from_config(read_checkpoint(gpt2)[0].config)
    other.resize_token_embeddings(40)

    torch.manual_seed(0)
    directory = save((other, attach_drawn(other, 64)), corpus, place / "small")
    message = refused(*COMMAND, directory, *FAST, "--split", "all", "--check", "ablation")
    assert "encoded with another tokenizer" in message
    assert "the model has 40" in message
