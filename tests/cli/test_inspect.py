"""prismlm inspect: of attention, channels, heads, prototypes, themes and uncertainty feedback."""

import json
import re
import shutil

import pytest
import torch

import prismlm
from prismlm.corpus import Corpus
from prismlm.corpus.windows import Sequences
from prismlm.explain.attention_maps import heads_of, read_maps
from prismlm.layers import PrototypeHead
from prismlm.models.checkpoint import read_checkpoint
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from prismlm.models.uncertainty_feedback import save_uncertainty
from prismlm.probes.channels.report import channel_report
from prismlm.probes.heads import head_report, spectra_report
from prismlm.probes.heads.roles import load_role_cases, search_roles
from prismlm.probes.uncertainty_feedback import (
    InspectOptions,
    corpus_sample,
    inspect_uncertainty_feedback,
)
from tests.helpers.chat_server import ChatServer
from tests.helpers.feedback_models import make_fed_gpt2, make_fed_protot
from tests.helpers.head_models import make_gpt2, make_signal_noise
from tests.helpers.mixer_models import (
    make_corpus,
    make_llama,
    make_model,
    save_model,
)

ATTENTION, CHANNEL, EFFECT, HEADS, SPECTRA, THEMES, FEEDBACK = (
    ("inspect", name)
    for name in (
        *("attention", "channels", "interventions", "heads", "spectra", "themes"),
        "uncertainty-feedback",
    )
)
RIVER = "The river — 日本 — carries stones"
MAPS = "Old maps — 日本, the river."
ALL = ("--split", "all")
ROW = 48
FAST = ("--texts", 12, "--tokens", 32)
CHECKS = ("ablation", "attention", "hedging", "mistakes", "probe")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("inspect")


@pytest.fixture(scope="module")
def corpus(place):
    return make_corpus(place)


@pytest.fixture(scope="module")
def protot(corpus, place):
    return save_model(make_model(len(corpus.tokenizer)), corpus, place / "protot")


@pytest.fixture(scope="module")
def llama(corpus, place):
    return save_model(make_llama(len(corpus.tokenizer)), corpus, place / "llama", trained_on=False)


def is_json_of(value, result):
    return value == json.loads(json.dumps(result))


# -- attention


@pytest.fixture(scope="module")
def with_head(corpus, place):
    """Signal/noise attention under a prototype head."""
    model = make_signal_noise(len(corpus.tokenizer))
    path = save_model(model, corpus, place / "signal-noise", trained_on=False)
    head = PrototypeHead(16, 8, 4)
    head.reset_parameters()
    save_sidecar(path, Sidecar(head, LogitMap.of(model), base_of(model)))
    return path


def test_attention_in_json_is_the_maps(document, with_head):
    value = document(*ATTENTION, with_head, RIVER, "--layer", 1, "--group", "noise")
    model, tokenizer = read_checkpoint(with_head)
    maps = read_maps(model, tokenizer, RIVER, heads_of(model, layer=1, group="noise"))
    assert len(value["maps"]) == 4
    for printed, expected in zip(value["maps"], maps, strict=True):
        assert printed.pop("strongest")[0]["weight"] == expected.strongest()[0].weight
        assert printed.pop("on_itself") == pytest.approx(expected.on_itself())
        assert is_json_of(printed, expected.to_dict())
    assert value["text"] == RIVER


def test_a_picture_of_a_hugging_face_model(prism, llama, tmp_path):
    out = tmp_path / "maps.png"
    result = prism(*ATTENTION, llama, "The river carries", "--head", 2, "--out", out)
    assert result.stderr == f"wrote {out}\n"
    assert "layer 1 · head 2" in result.stdout
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_roles_of_a_file_of_sentences(document, with_head, tmp_path):
    cases = tmp_path / "cases.jsonl"
    lines = [
        "One {subject:river} {action:carries} old {object:stones} to "
        "all of {structure:the} {target:sea}",
        "My {subject:teacher} {action:collects} some {object:names} for "
        "all of {structure:the} {target:birds}",
    ]
    cases.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    arguments = (*ATTENTION, with_head, "--roles", "--cases", cases, "--seed", 2)
    value = document(*arguments)
    search = search_roles(*read_checkpoint(with_head), load_role_cases(cases), seed=2)
    # Two sentences cannot tell a head from chance.
    untrained = value.pop("untrained")
    assert [untrained[role]["found"] for role in untrained] == [0, 0, 0, 0]
    assert (value.pop("cases"), value.pop("model")) == (str(cases), str(with_head))
    assert is_json_of(value, search.to_dict())


# -- channels and interventions


def test_channels_in_json_are_the_report_of_the_training_corpus(document, corpus, protot):
    sequences = Sequences(Corpus.open(corpus.path), "all", max_tokens=100_000)
    model = make_model(len(corpus.tokenizer))
    report = channel_report(model, corpus.tokenizer, sequences, name="protot").to_dict()
    assert is_json_of(document(*CHANNEL, protot, *ALL), report)


def test_a_text_alone_needs_no_corpus(prism, protot, tmp_path):
    page = tmp_path / "page.html"
    result = prism(*CHANNEL, protot, "--text", MAPS, "--html", page)
    assert result.stderr == f"wrote {page}\n"
    assert "the channel each token writes and reads most" in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.fixture(scope="module")
def cases(corpus, place):
    """Two models and a file of cases, as arguments of a command."""
    for seed in (0, 1):
        model = make_model(len(corpus.tokenizer))
        torch.manual_seed(seed)
        for block in model.model.layers:
            block.mixer.prototypes.copy_(torch.randn_like(block.mixer.prototypes))
        save_model(model, corpus, place / f"seed{seed}", trained_on=False)
    rows = [
        {"concept": "boxes", "context": f"{subject} collects letters in a", "target": "box"}
        for subject in ("Old maps", "A teacher", "The river", "My neighbour")
    ]
    path = place / "cases.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("--cases", path)


def test_a_channel_is_found_in_each_model(document, corpus, place, cases):
    models = [place / "seed0", place / "seed1"]
    options = ("--minimum", "1e-6", "--controls", "2")
    value = document(*EFFECT, *models, *cases, "--find", "--corpus", corpus.path, *options)
    assert [item["model"] for item in value["models"]] == [str(path) for path in models]
    for item in value["models"]:
        best = item["found"]["rows"][0]
        assert item["emerges"] == (item["found"]["p"] < 0.05)
        assert (item["cases"], item["left_out_cases"]) == (4, 0)
        assert len(item[f"L{best['layer']} P{best['channel']}"]["rows"]) == 4
        assert item["heldout_occurrences"] > 0


def test_interventions_on_named_channels(prism, place, cases):
    command = (*EFFECT, place / "seed0", *cases, "--minimum", "1e-6", "--controls", "1")
    shown = prism(*command, "--channel", "1:2", "--channel", "2:0").stdout
    assert "L1 P2: change in %" in shown
    assert "L2 P0: change in %" in shown


# -- heads and spectra


@pytest.fixture(scope="module")
def tiny(tiny_corpus):
    return Corpus.open(tiny_corpus)


@pytest.fixture(scope="module")
def signal_noise(tiny, place):
    return save_model(make_signal_noise(len(tiny.tokenizer)), tiny, place / "prism", length=ROW)


@pytest.fixture(scope="module")
def gpt2(tiny, place):
    return save_model(make_gpt2(len(tiny.tokenizer)), tiny, place / "gpt2", trained_on=False)


SOME = (*ALL, "--tokens", 1500)
OF_TINY = ("--corpus", "TINY", *ALL)


def test_heads_in_json_are_the_report_of_each_model(document, tiny, signal_noise):
    value = document(*HEADS, signal_noise, signal_noise, *SOME)
    model = make_signal_noise(len(tiny.tokenizer))
    report = head_report(model, Sequences(tiny, "all", ROW, 1500), name="prism").to_dict()
    assert is_json_of(value, {"models": [report, report]})


def test_spectra_in_json_are_the_report(document, tiny, signal_noise):
    value = document(*SPECTRA, signal_noise, *SOME)
    model, sequences = make_signal_noise(len(tiny.tokenizer)), Sequences(tiny, "all", ROW, 1500)
    report = spectra_report(model, sequences, name="prism", trained_length=ROW)
    assert is_json_of(value, report.to_dict())


def test_the_loss_of_any_decoder(document, gpt2, tiny):
    options = ("--corpus", tiny.path, "--loss-only", *ALL, "--context", 64)
    value = document(*SPECTRA, gpt2, *options)
    assert (value["loss"]["length"], value["loss"]["trained_length"]) == (64, None)
    assert "rates" not in value


# -- prototypes and themes


def test_a_list_and_a_card(prism, document, refused, tiny_model):
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
    assert "expected" in refused(*command, lens.num_prototypes)
    assert "leave out --search" in refused(*command, first, "--search", "law")
    message = refused(*command, "--category", "Morphologie")
    assert "no category 'Morphologie'" in message
    assert "prismlm label" in message


def test_themes_of_heads(document, corpus, llama):
    options = ("--corpus", corpus.path, *ALL, "--units", 6, "--layer", 1)
    value, units = document(*THEMES, llama, "--of", "heads", *options), 4
    assert (value["of"], value["judge"], value["asked"]) == ("heads", "words", None)
    rows = value["units"]["rows"]
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
        command = (*THEMES, model, *endpoint, "--units", 40)
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


@pytest.fixture(scope="module")
def save_fed(corpus, place):
    """Save a model and its feedback, as ``prismlm train`` does."""

    def save(name, model, feedback):
        path = save_model(model, corpus, place / name, length=ROW)
        save_uncertainty(path, feedback)
        return path

    return save


@pytest.fixture(scope="module")
def fed_gpt2(corpus, save_fed):
    return save_fed("fed-gpt2", *make_fed_gpt2(len(corpus.tokenizer)))


def test_feedback_in_json_is_the_report(prism, fed_gpt2, corpus):
    result = prism(*FEEDBACK, fed_gpt2, *FAST, *ALL, "--seed", 3, "--json")
    for part in ("Own signal: ", "Reading attention: ", "Generating: "):
        assert part in result.stderr, part
    sample = corpus_sample(corpus, "all", texts=12, tokens=32, seed=3)
    options = InspectOptions(seed=3)
    model = read_checkpoint(fed_gpt2)
    report = inspect_uncertainty_feedback(*model, sample, name="fed-gpt2", options=options)
    value = json.loads(result.stdout)
    assert is_json_of(value, report.to_dict())


def test_a_check_that_is_left_out_has_a_reason(prism, document, corpus, save_fed):
    model = save_fed("fed-protot", *make_fed_protot(len(corpus.tokenizer)))
    command = (*FEEDBACK, model, *FAST, *ALL)
    reason = "No attention: a model of type 'prismlm_protot' has no attention heads"
    assert reason in prism(*command).stdout
    checks = ("--check", "attention", "--check", "probe", "--passes", 0)
    value = document(*command, *checks)
    assert {check for check in CHECKS if value.get(check)} == {"probe"}
    assert "no attention heads" in value["left_out"]["attention"]
    assert value["options"]["passes"] == 0


def test_texts_from_files(document, fed_gpt2, tmp_path):
    texts = [f"Old maps carries stone number {n} to the sea." for n in range(6)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"words": text}) + "\n" for text in texts))
    command = (*FEEDBACK, fed_gpt2, "--check", "ablation")
    value = document(*command, path, "--text-column", "words")
    assert (value["sample"], value["texts"]) == ("texts.jsonl", 6)


# -- what is refused


@pytest.fixture(scope="module")
def seed(place, cases):
    return place / "seed0"


@pytest.mark.parametrize(
    ("command", "model", "arguments", "words"),
    [
        (ATTENTION, "with_head", (), "a text or --roles, got neither"),
        (ATTENTION, "with_head", (RIVER, "--group", "nose"), "'nose': expected 'signal' or"),
        (ATTENTION, "with_head", (RIVER, "--cases", "x"), "leave out --cases"),
        (ATTENTION, "with_head", ("--roles", "--out", "maps.png"), "leave out --out"),
        (CHANNEL, "llama", ("--corpus", "CORPUS", "--html", "x.html"), "no channels"),
        (EFFECT, "seed", (), "expected either channels"),
        (EFFECT, "seed", ("--find",), "go together"),
        (EFFECT, "seed", ("--channel", "1:9"), "no channel 9 in layer 1"),
        (EFFECT, "seed", ("--channel", "1"), "expected LAYER:CHANNEL"),
        (HEADS, "gpt2", OF_TINY, "window of 256 tokens.*64 positions"),
        (SPECTRA, "signal_noise", ("--context", 0), "--context.*greater than or equal to 2"),
        (THEMES, "llama", ("--of", "heads", "--lens", "sample"), "leave out --lens"),
        (THEMES, "llama", ("--corpus", "c", "--layer", 0), "leave out --corpus and --layer"),
        (FEEDBACK, "fed_gpt2", ("texts.jsonl", "--corpus", "c"), "leave out --corpus"),
        (FEEDBACK, "fed_gpt2", (*FAST, "--check", "prob"), "Did you mean 'probe'"),
        (FEEDBACK, "gpt2", ("--corpus", "CORPUS"), "uncertainty_feedback: {enabled: true"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(request, refused, corpus, tiny, command, model, arguments, words):
    places = {"CORPUS": corpus.path, "TINY": tiny.path}
    # Of an option that is given twice, the last one counts.
    first = request.getfixturevalue("cases") if command == EFFECT else ()
    words_of_it = (places.get(argument, argument) for argument in arguments)
    message = refused(*command, request.getfixturevalue(model), *first, *words_of_it)
    assert re.search(words, message)
