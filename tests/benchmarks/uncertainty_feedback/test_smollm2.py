"""Feedback put into a model that exists: what is trained, fed, measured and said."""

import argparse

import pytest
import torch
import torch.nn.functional as F

from benchmarks.uncertainty_feedback import smollm2
from benchmarks.uncertainty_feedback.smollm2 import NONE, OWN, SHUFFLED
from prismlm.corpus import Corpus
from prismlm.files import read_json
from prismlm.ops.uncertainty_feedback import NO_CODE
from tests.benchmarks.scripts import run
from tests.helpers.tiny import build_small_corpus

FEW = ("--device", "cpu", "--steps", 3, "--batch", 2, "--length", 32, "--documents", 5)


@pytest.fixture(scope="module")
def small_corpus(tiny_model, tmp_path_factory):
    return build_small_corpus(tiny_model, tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def given(tiny_model, small_corpus) -> argparse.Namespace:
    words = [tiny_model, small_corpus, *FEW, "--table-alone"]
    return smollm2.options().parse_args([str(word) for word in words])


def test_before_its_first_step_every_arm_predicts_as_the_model(given, small_corpus):
    windows = smollm2.heldout_windows(Corpus.open(small_corpus), 32, 5)
    given = argparse.Namespace(**(vars(given) | {"table_alone": False}))
    found = {}
    for arm in (NONE, OWN):
        begun = smollm2.prepared(given, arm, 0)
        found |= smollm2.judged(begun.model, begun.feedback, windows, 0)["losses"]
    assert found[OWN] == found[SHUFFLED] == found[NONE]


def test_losses_are_of_the_first_window_of_each_document(given, small_corpus):
    corpus = Corpus.open(small_corpus)
    begun = smollm2.prepared(given, NONE, 0)
    windows = smollm2.heldout_windows(corpus, 32, 5)
    found = smollm2.judged(begun.model, None, windows, 0)
    documents = sorted(d for batch in windows for d in batch.document.tolist())
    assert len(documents) == 5
    first = documents[0]
    ids = torch.from_numpy(corpus.read_tokens(int(corpus.starts[first]), 32).astype("int64"))
    with torch.no_grad():
        logits = begun.model(ids[None]).logits[0]
    expected = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    assert found["losses"][NONE][0] == pytest.approx(float(expected), abs=2e-3)
    assert found["tokens"][0] == 31


def test_the_control_is_trained_with_codes_of_other_positions(given, small_corpus):
    corpus, fed = Corpus.open(small_corpus), {}
    for arm in (OWN, SHUFFLED):
        begun = smollm2.prepared(given, arm, 0)
        rows = smollm2.pack(corpus, corpus.split("train"), 32, 0)
        settings = {"arm": arm, "seed": 0, "steps": 3, "batch": 2}
        training = smollm2.Training(begun, rows, settings)
        begun.model.register_forward_hook(
            lambda _model, _args, output, arm=arm: fed.update({arm: output.uncertainty_codes})
        )
        training.take(smollm2.np.array([0, 1]))
        assert float(begun.feedback.embedding.weight.detach().abs().max()) > 0
    own, shuffled = fed[OWN], fed[SHUFFLED]
    assert not torch.equal(own, shuffled)
    assert torch.equal(own == NO_CODE, shuffled == NO_CODE)
    assert torch.equal(own.flatten().sort().values, shuffled.flatten().sort().values)


def test_runs_are_made_once(tiny_model, small_corpus, tmp_path, monkeypatch):
    words = [tiny_model, small_corpus, *FEW, "--out", tmp_path / "runs.json", "--seeds", 0, 1]
    run(smollm2, monkeypatch, *words, "--table-alone")
    runs = read_json(tmp_path / "runs.json")["runs"]
    # Without adapters nothing but the table learns: one run without feedback stands for all.
    assert [(one["arm"], one["seed"]) for one in runs] == [
        (NONE, 0), (OWN, 0), (SHUFFLED, 0), (OWN, 1), (SHUFFLED, 1)
    ]  # fmt: skip
    run(smollm2, monkeypatch, *words, "--table-alone")
    assert len(read_json(tmp_path / "runs.json")["runs"]) == 5
    run(smollm2, monkeypatch, *words, "--arms", NONE, "--seeds", 0)
    more = read_json(tmp_path / "runs.json")["runs"]
    assert len(more) == 6
