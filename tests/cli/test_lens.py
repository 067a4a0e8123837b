"""prismlm attach, index, inspect, label, map and export."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from sae_lens import SAE
from safetensors.torch import load_file, save_file

import prismlm
import prismlm.models.sae_lens
from prismlm.corpus import Corpus
from prismlm.lens.labels.map import regions
from prismlm.lens.layout import read_meta
from prismlm.lens.options import IndexOptions
from tests.helpers import forked
from tests.helpers.chat_server import ChatServer, good
from tests.helpers.lens_files import named_model

SMALL = ("--prototypes", 32, "--prototypes-per-token", 4, "--epochs", 0.5, "--window", 64)
FOREIGN = {"name": "医学术语", "description": "关于疾病与治疗的词语", "role": "名词"}
EIGHT = ("--contexts", 8, "--precision", "float32")


def edit_meta(model: Path, corpus: dict[str, str] | None) -> None:
    """Note another training corpus in a model directory."""
    meta = json.loads((model / "prismlm.json").read_text(encoding="utf-8"))
    meta["provenance"]["corpus"] = corpus
    (model / "prismlm.json").write_text(json.dumps(meta), encoding="utf-8")


@pytest.fixture(scope="module")
def indexed(tiny_model, short_corpus, tmp_path_factory, prism):
    """The tiny model, as if trained on the short corpus, with a lens by the command alone."""
    model, corpus = tmp_path_factory.mktemp("indexed") / "model", Corpus.open(short_corpus)
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("lens"))
    edit_meta(model, {"name": corpus.name, "fingerprint": corpus.fingerprint})
    return model, prism("index", model, "--corpus", short_corpus, *EIGHT, "--json")


def test_index_with_its_defaults(refused, indexed, short_corpus, tmp_path):
    model, result = indexed
    summary, lens = json.loads(result.stdout), model / "lens" / "small"
    meta = read_meta(lens)
    # The recipe's 128 tokens, three quarters of them, and the corpus the model was trained on.
    assert (meta.window, meta.stride, meta.contexts) == (128, 96, 8)
    assert meta.trained_on is True
    assert summary["lens"] == str(lens)
    assert (summary["tokens"], summary["documents"]) == (meta.tokens, meta.documents)
    usage = pq.read_table(lens / "prototypes.parquet")["usage"].to_numpy()
    assert summary["prototypes"] == len(usage) == 192
    assert summary["in_use"] == (usage > 0).sum()
    assert "Indexing: " in result.stderr
    prismlm.index(model, Corpus.open(short_corpus), tmp_path / "same", IndexOptions(contexts=8))
    for name in ("index.parquet", "cells.npy"):
        assert (lens / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    assert "--overwrite" in refused("index", model, "--corpus", short_corpus)


def test_a_stale_lens_is_rebuilt_by_the_command_in_the_message(prism, copy, short_corpus):
    head = copy / "prototype_head.safetensors"
    tensors = load_file(str(head))
    tensors["prototypes"][0, 0] += 0.5
    save_file(tensors, str(head))
    edit_meta(copy, None)
    command = ("index", copy, "--corpus", short_corpus, "--lens", "sample", "--overwrite")
    options = ("--contexts", 2, "--window", 64, "--split", "heldout", "--no-text")
    assert "in use" in prism(*command, *options).stdout
    lens = prismlm.load(copy).lens
    assert lens is not None
    assert (lens.meta.window, lens.meta.stride, lens.meta.split) == (64, 48, "heldout")
    assert lens.meta.trained_on is None
    assert lens.index["token"].null_count == lens.index.num_rows


def test_dry_run_writes_nothing(document, indexed, short_corpus):
    model, _ = indexed
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    estimate = document("index", model, "--corpus", short_corpus, "--lens", "new", "--dry-run")
    assert estimate["tokens"] == read_meta(model / "lens" / "small").tokens
    assert 0.01 < estimate["seconds"] < 600
    assert estimate["memory_bytes"] > 10**8
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before


def test_inspect(prism, document, refused, copy):
    value = document("inspect", copy)
    lens = copy / "lens" / "sample"
    meta = read_meta(lens)
    assert value["tokens"] == value["convergence"][-1]["tokens"] == meta.tokens
    assert 0 < value["converged_at"] <= 1
    assert 0.2 < value["convergence"][0]["share"] < 0.8
    assert value["contexts"] == pq.read_table(lens / "index.parquet").num_rows
    shown = " ".join(prism("inspect", "index", copy, "--verify").stdout.split())
    for words in ("nearest", "share", "weights verified", value["verdict"]):
        assert words in shown
    data = (lens / "probe.safetensors").read_bytes()
    (lens / "probe.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "is damaged" in refused("inspect", copy)
    shutil.rmtree(copy / "lens")
    assert "has no lens" in refused("inspect", copy)


def under_torchrun(arguments):
    """Fork three processes with the environment that torchrun sets."""
    sizes = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    started = [forked.start(*arguments, **sizes, RANK=rank) for rank in "012"]
    streams = [process.communicate(240) for process in started]
    assert [process.returncode for process in started] == [0] * 3, streams
    return "".join(stdout for stdout, _ in streams)


def test_shards_under_torchrun_and_by_hand(prism, document, indexed, short_corpus, tmp_path):
    model = shutil.copytree(indexed[0], tmp_path / "model")
    command = ("index", model, "--corpus", short_corpus, *EIGHT)
    summary = json.loads(under_torchrun([*command, "--lens", "spread", "--json"]))
    assert summary["prototypes"] == 192
    first = document(*command, "--lens", "parts", "--shard", "2/2")
    assert first == {"lens": None, "shards": 2, "done": [2], "left": [1]}
    prism(*command, "--lens", "parts", "--shard", "1/2")
    for_all = prism(*command, "--lens", "divided", "--parts", "3", "--device", "cpu")
    assert "Parts: " in for_all.stderr
    made = {path.name: path for path in (model / "lens").iterdir()}
    assert made.keys() == {"divided", "parts", "small", "spread"}
    for name in ("index.parquet", "cells.npy", "prototypes.parquet", "meta.json"):
        assert len({(path / name).read_bytes() for path in made.values()}) == 1, name


def test_an_attach_estimate_writes_nothing(document, refused, tiny_model, tiny_corpus, tmp_path):
    out = tmp_path / "out"
    arguments = ("--corpus", tiny_corpus, "--out", out, *SMALL, "--dry-run")
    for option in ("--lora-epochs", "--uncertainty-epochs"):
        assert f"leave out {option}" in refused("attach", tiny_model, *arguments, option, 3)
    estimate = document("attach", tiny_model, *arguments)
    assert estimate["tokens"] == estimate["states"] == prismlm.load(tiny_model).lens.meta.tokens
    assert estimate["seconds"] > 0
    assert not out.exists()


def test_files_are_attached_and_explained(prism, tiny_model, tmp_path):
    texts, more, out = (tmp_path / name for name in ("texts.txt", "more", "out"))
    texts.write_text("The little man lived in a house by the sea. " * 60)
    more.mkdir()
    for number in range(60):
        (more / f"{number}.txt").write_text(f"Letter {number}: the sea was calm today. " * 6)
    files = ("--corpus", texts, "--corpus", more, "--out", out)
    result = prism("attach", tiny_model, *files, *SMALL, "--weights", "cosine")
    for task in ("Reading hidden states", "Fitting prototypes", "Indexing"):
        assert task in result.stderr
    assert "prototype only cross-entropy" in result.stdout
    assert result.stdout.rstrip().endswith(str(out))
    assert json.loads((out / "prismlm.json").read_text())["weights"] == "cosine"
    assert "Documents behind it" in prism("explain", out, "The little man lived in a house").stdout


@pytest.fixture(scope="module")
def labelled(indexed, tmp_path_factory):
    """A copy to name."""
    return shutil.copytree(indexed[0], tmp_path_factory.mktemp("label") / "model")


def test_names_are_made_shown_and_used(prism, document, refused, labelled):
    shown = prism("label", labelled).stdout
    assert "of 192 prototypes named" in shown
    assert "shuffled" in shown
    assert "→" in shown
    assert "already" in refused("label", labelled)
    value = document("label", labelled, "--overwrite")
    assert value["source"] == "embedded"
    assert sum(value["categories"].values()) == value["named"]
    trace = document("explain", labelled, "Once upon a time there was a little")
    uses = trace["positions"][-1]["prototypes"]
    names = [use["name"] for use in uses if use["category"]]
    assert any("→" in name or "-" in name for name in names)


def test_a_map_names_its_regions(prism, document, tiny_model, tmp_path):
    lm = named_model(tiny_model, tmp_path / "model")
    named = [{"x": x, "y": y, "name": name} for x, y, name in regions(lm.lens)]
    assert document("map", lm.path)["regions"] == named
    assert "regions" in prism("map", lm.path).stdout


@pytest.mark.parametrize(
    ("answers", "count", "notes"),
    [
        ({}, 5, ("requests 5", "tokens in 500", "tokens out 50")),
        (FOREIGN, 30, ("another language than the corpus",)),
    ],
)
def test_a_language_model_names(prism, labelled, answers, count, notes):
    def answer(request, number):
        return {key: answers.get(key, value) for key, value in good(request).items()}

    with ChatServer(answer) as server:
        endpoint = ("--endpoint", server.url, "--endpoint-model", "m\x1b[31m")
        result = prism("label", labelled, *endpoint, "--prototypes", count, "--overwrite")
    words = " ".join(result.stdout.split())
    assert all(part in words for part in (f"named {count}", *notes)), words
    assert "\x1b[31m" not in result.stdout + result.stderr


def test_a_server_that_is_down_changes_nothing(refused, labelled):
    def files():
        return {path: path.read_bytes() for path in labelled.rglob("*") if path.is_file()}

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    before, endpoint = files(), ("--endpoint", url, "--endpoint-model", "m")
    message = refused("label", labelled, *endpoint, "--overwrite")
    assert f"error: {url}: it cannot be reached" in message
    assert files() == before


@pytest.mark.parametrize("to", ["sae-lens", "neuronpedia"])
def test_export_writes_a_new_directory(tiny_model, tmp_path, prism, refused, to):
    out = tmp_path / "out"
    assert prism("export", tiny_model, out, "--to", to).stdout.strip() == str(out)
    if to == "sae-lens":
        assert SAE.load_from_disk(out).cfg.architecture() == "prismlm_prototypes"
    else:
        assert list(out.glob("*/*/features/batch-0.jsonl.gz"))
    assert "exists already" in refused("export", tiny_model, out, "--to", to)
