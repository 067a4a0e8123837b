"""A model whose layers are on disk is explained, edited and indexed as one in memory."""

import filecmp
import json

import pytest
import torch

import prismlm
from prismlm.corpus.store import Corpus
from prismlm.lens.build import IndexOptions, build_index
from tests.helpers import forked

TEXT = "The heart pumps blood through the body"


def device_map(lm, **places):
    """Return a map that leaves the layers and both embeddings on disk."""
    model = lm.model
    names = [name for name, module in model.named_modules() if not [*module.children()]]
    layers = {f"model.layers.{n}" for n in range(model.config.num_hidden_layers)}
    others = {n: "cpu" for n in names if not n.startswith("model.layers.")}
    disk = dict.fromkeys(layers | {"lm_head", "model.embed_tokens"}, "disk")
    return others | disk | places


@pytest.fixture(scope="module")
def pair(tiny_model):
    plain = prismlm.load(tiny_model)
    spread = prismlm.load(tiny_model, device=device_map(plain))
    return plain, spread


def test_answers_traces_and_edits_are_those_of_the_whole_model(pair):
    """The layers are on disk, and the embeddings in memory."""
    plain, spread = pair
    on_disk = {name for name, p in spread.model.named_parameters() if p.is_meta}
    assert on_disk == {n for n, _ in plain.model.named_parameters() if ".layers." in n}
    assert spread.model.device == spread.head.prototypes.device == torch.device("cpu")
    traces = [lm.explain(TEXT, generate=5) for lm in pair]
    assert traces[1].answer == traces[0].answer
    first, second = (trace.to_dict() for trace in traces)
    assert first == second
    edit = prismlm.Ablate(prototype=traces[0][-1].prototypes[0].id)
    answers = []
    for lm in pair:
        with lm.edit(edit):
            answers.append(lm.explain(TEXT, generate=3).to_dict())
    assert answers[0] == answers[1]
    assert answers[0] != first


def test_its_lens_is_that_of_the_whole_model(pair, short_corpus, tmp_path):
    corpus, options = Corpus.open(short_corpus), IndexOptions(window=128, with_text=False)
    for name, lm in zip(("plain", "spread"), pair, strict=True):
        build_index(lm.model, lm.head, corpus, tmp_path / name, options)
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    compared = filecmp.cmpfiles(tmp_path / "plain", tmp_path / "spread", names, shallow=False)
    assert compared[1:] == ([], [])


def test_the_command_spreads_a_model(tiny_model):
    command = ("explain", tiny_model, TEXT, "--json")
    plain, spread = (forked.run(*command, "--device", name) for name in ("cpu", "balanced"))
    assert spread.returncode == 0, spread.stderr
    assert json.loads(spread.stdout) == json.loads(plain.stdout)
