"""prismlm inspect attention: maps of a text, and the search for roles."""

import json
import struct

import pytest
import torch

from prismlm.explain.attention_maps import heads_of, read_maps
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.decoders.signal_noise import SignalNoiseConfig, SignalNoiseForCausalLM
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.probes.heads.roles import load_role_cases, search_roles
from tests.helpers.mixer_models import make_corpus, make_llama, make_model, save_model

COMMAND = ("inspect", "attention")
TEXT = "The river — 日本 — carries stones"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("attention")


@pytest.fixture(scope="module")
def corpus(place):
    return make_corpus(place)


@pytest.fixture(scope="module")
def directory(corpus, place):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_size": 4, "initializer_range": 0.3}
    config = SignalNoiseConfig(vocab_size=len(corpus.tokenizer), **sizes)
    model = SignalNoiseForCausalLM(config).eval()
    path = save_model(model, corpus, place / "model", trained_on=False)
    head = PrototypeHead(16, 8, 4)
    head.reset_parameters()
    save_sidecar(path, Sidecar(head, LogitMap.of(model), base_of(model)))
    return path


def test_json_is_the_maps(document, directory):
    value = document(*COMMAND, directory, TEXT, "--layer", 1, "--group", "noise")
    model, tokenizer = read_checkpoint(directory)
    maps = read_maps(model, tokenizer, TEXT, heads_of(model, layer=1, group="noise"))
    assert len(value["maps"]) == 4
    for printed, expected in zip(value["maps"], maps, strict=True):
        assert printed.pop("strongest")[0]["weight"] == expected.strongest()[0].weight
        assert printed.pop("on_itself") == pytest.approx(expected.on_itself())
        assert printed == json.loads(json.dumps(expected.to_dict()))
    assert value["text"] == TEXT


def test_a_picture_of_a_hugging_face_model(prism, corpus, place, tmp_path):
    llama = make_llama(len(corpus.tokenizer))
    save_model(llama, corpus, place / "llama", trained_on=False)
    out = tmp_path / "maps.png"
    result = prism(*COMMAND, place / "llama", "The river carries", "--head", 2, "--out", out)
    assert result.stderr == f"wrote {out}\n"
    assert "layer 1 · head 2" in result.stdout
    data = out.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 200


def test_roles_of_a_file_of_sentences(prism, directory, tmp_path):
    cases = tmp_path / "cases.jsonl"
    lines = [
        "One {subject:river} {action:carries} old {object:stones} to "
        "all of {structure:the} {target:sea}",
        "My {subject:teacher} {action:collects} some {object:names} for "
        "all of {structure:the} {target:birds}",
    ]
    cases.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    arguments = (*COMMAND, directory, "--roles", "--cases", cases, "--draws", 1500, "--seed", 2)
    result = prism(*arguments, "--json")
    assert "Reading attention" in result.stderr
    value = json.loads(result.stdout)
    model, tokenizer = read_checkpoint(directory)
    search = search_roles(model, tokenizer, load_role_cases(cases), draws=1500, seed=2)
    # Two sentences cannot tell a head from chance.
    untrained = value.pop("untrained")
    assert [untrained[role]["found"] for role in untrained] == [0, 0, 0, 0]
    assert (value.pop("cases"), value.pop("model")) == (str(cases), str(directory))
    assert value == json.loads(json.dumps(search.to_dict()))
    shown = prism(*arguments).stdout
    assert [line.split()[0] for line in shown.splitlines()[2:6]] == list(untrained)
    assert "heads 16" in " ".join(shown.split())
    assert shown.count("found 0") == 8


def test_bad_input_is_refused(refused, place, corpus, directory, tmp_path):
    protot = save_model(
        make_model(len(corpus.tokenizer)), corpus, place / "protot", trained_on=False
    )
    for arguments, words in (
        ((directory,), ["a text or --roles, got neither"]),
        ((directory, TEXT, "--roles"), ["got both"]),
        ((directory, "T"), ["has 1 token", "at least 2"]),
        ((directory, TEXT, "--layer", 2), ["no layer 2", "0 to 1"]),
        ((directory, TEXT, "--head", 8), ["no head 8", "0 to 7"]),
        ((directory, TEXT, "--group", "nose"), ["'nose'", "expected 'signal' or 'noise'"]),
        ((directory, "T " * 40, "--out", tmp_path / "maps.png"), ["at most 48"]),
        ((directory, TEXT, "--cases", tmp_path / "x"), ["--cases and --draws are for --roles"]),
        ((directory, "--roles", "--draws", 10), ["at least 1280 draws"]),
        ((directory, "--roles", "--out", "maps.png"), ["--out is a picture of one text"]),
        ((directory, "--roles", "--cases", tmp_path / "x"), ["x cannot be read"]),
        ((protot, TEXT), ["'prismlm_protot' has no attention heads"]),
    ):
        message = refused(*COMMAND, *arguments)
        assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


def test_attention_in_the_document_of_explain(document, refused, directory):
    command = ("explain", directory, "The river", "--generate", 2)
    value = document(*command, "--attention", "1:5", "--attention", "0:0")
    maps = value.pop("attention")
    assert value == document(*command)
    heads = [(one["layer"], one["head"], one["group"]) for one in maps]
    assert heads == [(1, 5, "noise"), (0, 0, "signal")]
    for one in maps:
        assert one["positions"] == [entry["position"] for entry in value["positions"]]
        assert one["tokens"] == [entry["token"] for entry in value["positions"]]
    for options, words in (
        (("--attention", "1:5"), "add --json"),
        (("--attention", "1", "--json"), "expected LAYER:HEAD"),
        (("--attention", "2:0", "--json"), "no layer 2"),
    ):
        assert words in refused(*command, *options)
