"""prismlm inspect: of attention, channels, heads, prototypes, themes and uncertainty feedback."""

import json
import shutil

import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.explain.attention_maps import heads_of, read_maps
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.uncertainty_feedback import save_uncertainty
from prismlm.probes.channels.report import channel_report
from prismlm.probes.heads import head_report, spectra_report
from prismlm.probes.heads.roles import load_role_cases, search_roles
from prismlm.probes.results import as_json
from prismlm.probes.uncertainty_feedback import (
    InspectOptions,
    corpus_sample,
    inspect_uncertainty_feedback,
)
from tests.helpers.chat_server import ChatServer
from tests.helpers.mixer_models import save_model
from tests.helpers.records import write_jsonl
from tests.helpers.small_models import make_fed_gpt2, make_fed_protot, make_signal_noise

RIVER = "The river — 日本 — carries stones"
ALL = ("--split", "all")
ROW = 48


@pytest.fixture(scope="module")
def corpus(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture(scope="module")
def save(corpus, tmp_path_factory):
    """Save a model, and its feedback, as ``prismlm train`` does."""

    def save(name, model, feedback=None):
        path = save_model(model, corpus, tmp_path_factory.mktemp("model") / name, length=ROW)
        if feedback is not None:
            save_uncertainty(path, feedback)
        return path

    return save


@pytest.fixture(scope="module")
def signal_noise(corpus, save):
    return save("prism", make_signal_noise(len(corpus.tokenizer)))


@pytest.fixture(scope="module")
def fed(corpus, save):
    return save("fed", *make_fed_gpt2(len(corpus.tokenizer)))


# -- attention


def test_attention_in_json_is_the_maps(document, signal_noise):
    command = ("inspect", "attention", signal_noise, RIVER, "--layer", 1, "--group", "noise")
    value = document(*command)
    model, tokenizer = read_checkpoint(signal_noise)
    maps = read_maps(model, tokenizer, RIVER, heads_of(model, layer=1, group="noise"))
    assert len(value["maps"]) == 4
    for printed, expected in zip(value["maps"], maps, strict=True):
        assert printed.pop("strongest")[0]["weight"] == expected.strongest()[0].weight
        assert printed.pop("on_itself") == pytest.approx(expected.on_itself())
        assert printed == as_json(expected.to_dict())
    assert value["text"] == RIVER


def test_a_picture_of_a_model_with_a_prototype_head(prism, tiny_model, tmp_path):
    out = tmp_path / "maps.png"
    command = ("inspect", "attention", tiny_model, "The river carries", "--head", 1, "--out", out)
    result = prism(*command)
    assert result.stderr == f"wrote {out}\n"
    assert "layer 1 · head 1" in result.stdout
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_roles_of_a_file_of_sentences(document, signal_noise, tmp_path):
    lines = [
        "One {subject:river} {action:carries} old {object:stones} to "
        "all of {structure:the} {target:sea}",
        "My {subject:teacher} {action:collects} some {object:names} for "
        "all of {structure:the} {target:birds}",
    ]
    cases = write_jsonl(tmp_path / "cases.jsonl", [{"text": line} for line in lines])
    options = ("--roles", "--cases", cases, "--seed", 2)
    value = document("inspect", "attention", signal_noise, *options)
    search = search_roles(*read_checkpoint(signal_noise), load_role_cases(cases), seed=2)
    # Two sentences cannot tell a head from chance.
    untrained = value.pop("untrained")
    assert [untrained[role]["found"] for role in untrained] == [0, 0, 0, 0]
    assert (value.pop("cases"), value.pop("model")) == (str(cases), str(signal_noise))
    assert value == as_json(search.to_dict())


# -- channels and interventions


def test_channels_of_a_corpus_and_of_a_text(prism, document, studied, tmp_path):
    command, page = ("inspect", "channels", studied / "protot"), tmp_path / "page.html"
    sequences = Sequences(Corpus.open(studied / "corpus"), "all", max_tokens=100_000)
    report = channel_report(*read_checkpoint(studied / "protot"), sequences, name="protot")
    value = document(*command, "--corpus", studied / "corpus", *ALL)
    assert value == as_json(report.to_dict())
    result = prism(*command, "--text", RIVER, "--html", page)
    assert result.stderr == f"wrote {page}\n"
    assert "the channel each token writes and reads most" in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_channel_is_found_in_each_model_or_named(prism, document, studied, tmp_path):
    model = studied / "protot"
    rows = [
        {"concept": "boxes", "context": f"{subject} collects letters in a", "target": "box"}
        for subject in ("Old maps", "A teacher", "The river", "My neighbour")
    ]
    cases = write_jsonl(tmp_path / "cases.jsonl", rows)
    options = ("--cases", cases, "--minimum", "1e-6", "--controls", "2")
    find = ("--find", "--corpus", studied / "corpus")
    value = document("inspect", "interventions", model, model, *options, *find)
    assert [item["model"] for item in value["models"]] == [str(model)] * 2
    for item in value["models"]:
        best = item["found"]["rows"][0]
        assert item["emerges"] == (item["found"]["p"] < 0.05)
        assert (item["cases"], item["left_out_cases"]) == (4, 0)
        assert len(item[f"L{best['layer']} P{best['channel']}"]["rows"]) == 4
        assert item["heldout_occurrences"] > 0
    named = ("--channel", "1:2", "--channel", "2:0")
    shown = prism("inspect", "interventions", model, *options, *named).stdout
    assert "L1 P2: change in %" in shown
    assert "L2 P0: change in %" in shown


# -- heads and spectra


def test_heads_and_spectra_in_json_are_the_reports(document, corpus, signal_noise):
    some = (*ALL, "--tokens", 1500)
    model, sequences = read_checkpoint(signal_noise)[0], Sequences(corpus, "all", ROW, 1500)
    heads = as_json(head_report(model, sequences, name="prism").to_dict())
    value = document("inspect", "heads", signal_noise, signal_noise, *some)
    assert value == {"models": [heads, heads]}
    spectra = spectra_report(model, sequences, name="prism", trained_length=ROW)
    value = document("inspect", "spectra", signal_noise, *some)
    assert value == as_json(spectra.to_dict())


def test_the_loss_of_any_decoder(document, studied):
    options = ("--corpus", studied / "corpus", "--loss-only", *ALL, "--context", 32)
    value = document("inspect", "spectra", studied / "gpt2", *options)
    assert (value["loss"]["length"], value["loss"]["trained_length"]) == (32, None)
    assert "rates" not in value


# -- prototypes and themes


def test_a_list_and_a_card(prism, document, tiny_model):
    lens, command = prismlm.load(tiny_model).lens, ("inspect", "prototypes", tiny_model)
    everything = document(*command, "--limit", "500", "--all")
    assert everything["total"] == lens.num_prototypes
    few = int((lens.cell_sizes < 10).sum())
    listed = document(*command, "--limit", "500")
    assert listed["total"] == lens.num_prototypes - few
    assert listed["items"] == [row for row in everything["items"] if row["positions"] >= 10]
    assert ("fewer than 10 places are not listed: --all" in prism(*command).stdout) == (few > 0)
    sizes = [row["positions"] for row in everything["items"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == lens.meta.cells["rows"]
    first = everything["items"][0]["id"]
    card = document(*command, first)
    assert card["contexts"] == lens.index.to_pylist()[lens.rows_of(first)][:12]
    assert card["name"] in prism(*command, first).stdout


def test_themes_of_heads(document, studied):
    options = ("--corpus", studied / "corpus", *ALL, "--units", 6, "--layer", 1)
    value = document("inspect", "themes", studied / "llama", "--of", "heads", *options)
    assert (value["of"], value["judge"], value["asked"]) == ("heads", "words", None)
    rows, units = value["units"]["rows"], 2
    assert len(rows) == units
    for summary in value["figures"]["rows"]:
        values = [unit[summary["figure"]] for unit in rows]
        assert summary["histogram"] == [values.count(i) for i in range(1, 11)]
        assert summary["mean"] == pytest.approx(sum(values) / units)
        assert sum(summary["random_histogram"]) == units
        difference = summary["difference"]
        assert difference["low"] <= difference["value"] <= difference["high"]


def test_prototypes_by_an_endpoint_with_some_invalid_answers(document, tiny_model, tmp_path):
    # A copy, since answers are kept in it.
    model = shutil.copytree(tiny_model, tmp_path / "model")
    good = {"theme": "tides", "disentanglement": 9, "coverage": 10, "themes": 1}
    good["explanation"] = "Sea."
    with ChatServer(lambda request, number: "hm" if number in (1, 2) else good) as server:
        endpoint = ("--endpoint", server.url, "--endpoint-model", "m\x1b[31m")
        command = ("inspect", "themes", model, *endpoint, "--units", 40)
        value, requests = document(*command), len(server.requests)
        again = document(*command)
    rows = value["units"]["rows"]
    assert value["judge"] == "endpoint:m [31m"
    assert {unit["theme"] for unit in rows if "theme" in unit} == {"tides"}
    assert value["asked"]["requests"] == requests
    # Only questions without an answer are asked again.
    assert again["asked"]["requests"] <= 4
    assert value["figures"]["rows"][1]["mean"] == 10


# -- uncertainty feedback


def test_feedback_in_json_is_the_report(prism, fed, corpus):
    options = ("--texts", 12, "--tokens", 32, *ALL, "--seed", 3, "--json")
    result = prism("inspect", "uncertainty-feedback", fed, *options)
    for part in ("Own signal: ", "Reading attention: ", "Generating: "):
        assert part in result.stderr, part
    sample = corpus_sample(corpus, "all", texts=12, tokens=32, seed=3)
    how = {"name": "fed", "options": InspectOptions(seed=3)}
    report = inspect_uncertainty_feedback(*read_checkpoint(fed), sample, **how)
    assert json.loads(result.stdout) == as_json(report.to_dict())


def test_a_check_that_is_left_out_has_a_reason(prism, document, corpus, save):
    model = save("fed-protot", *make_fed_protot(len(corpus.tokenizer)))
    command = ("inspect", "uncertainty-feedback", model, "--texts", 12, "--tokens", 32, *ALL)
    reason = "No attention: a model of type 'prismlm_protot' has no attention heads"
    assert reason in prism(*command).stdout
    value = document(*command, "--check", "attention", "--check", "probe", "--passes", 0)
    checks = ("ablation", "attention", "hedging", "mistakes", "probe")
    assert [check for check in checks if value.get(check)] == ["probe"]
    assert "no attention heads" in value["left_out"]["attention"]
    assert value["options"]["passes"] == 0


def test_texts_from_files(document, fed, tmp_path):
    rows = [{"words": f"Old maps carries stone number {n} to the sea."} for n in range(6)]
    path = write_jsonl(tmp_path / "texts.jsonl", rows)
    command = ("inspect", "uncertainty-feedback", fed, "--check", "ablation")
    value = document(*command, path, "--text-column", "words")
    assert (value["sample"], value["texts"]) == ("texts.jsonl", 6)
