"""Uncertainty feedback: what models are fed, signal by signal, and an existing model fine-tuned."""

import argparse

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.uncertainty_feedback import measure as validation
from benchmarks.uncertainty_feedback import smollm2
from benchmarks.uncertainty_feedback.smollm2 import NONE, OWN, SHUFFLED
from prismlm.corpus import Corpus
from prismlm.corpus.windows import WindowBatch
from prismlm.files import read_json
from prismlm.ops.uncertainty_feedback import NO_CODE, entropy_codes
from prismlm.training.setup import PreviousBatch
from tests.helpers.small_models import FAMILIES, V, attach_drawn

FEW = ("--device", "cpu", "--steps", 3, "--batch", 2, "--length", 32, "--documents", 5)


@pytest.fixture(scope="module")
def given(tiny_model, short_corpus):
    words = [tiny_model, short_corpus, *FEW, "--table-alone"]
    return smollm2.options().parse_args([str(word) for word in words])


def test_before_its_first_step_every_arm_predicts_as_the_model(given, short_corpus):
    windows = smollm2.heldout_windows(Corpus.open(short_corpus), 32, 5)
    given = argparse.Namespace(**(vars(given) | {"table_alone": False}))
    found = {}
    for arm in (NONE, OWN):
        begun = smollm2.prepared(given, arm, 0)
        found |= smollm2.judged(begun.model, begun.feedback, windows, 0)["losses"]
    assert found[OWN] == found[SHUFFLED] == found[NONE]


def test_losses_are_of_the_first_window_of_each_document(given, short_corpus):
    corpus = Corpus.open(short_corpus)
    begun = smollm2.prepared(given, NONE, 0)
    windows = smollm2.heldout_windows(corpus, 32, 5)
    found = smollm2.judged(begun.model, None, windows, 0)
    documents = sorted(d for batch in windows for d in batch.document.tolist())
    assert len(documents) == 5
    ids = corpus.read_tokens(int(corpus.starts[documents[0]]), 32)
    ids = torch.from_numpy(ids.astype("int64"))
    with torch.no_grad():
        logits = begun.model(ids[None]).logits[0]
    expected = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    assert found["losses"][NONE][0] == pytest.approx(float(expected), abs=2e-3)
    assert found["tokens"][0] == 31


def test_the_control_is_trained_with_codes_of_other_positions(given, short_corpus):
    corpus, fed = Corpus.open(short_corpus), {}
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


def test_runs_are_made_once(tiny_model, short_corpus, tmp_path, run):
    words = [tiny_model, short_corpus, *FEW, "--out", tmp_path / "runs.json", "--seeds", 0, 1]
    for _ in range(2):
        run(smollm2, *words, "--table-alone")
        runs = read_json(tmp_path / "runs.json")["runs"]
        # Without adapters nothing but the table learns: one run without feedback stands for all.
        made = [(one["arm"], one["seed"]) for one in runs]
        assert made == [(NONE, 0), (OWN, 0), (SHUFFLED, 0), (OWN, 1), (SHUFFLED, 1)]


def test_signals_are_what_they_are_called():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]()).eval()
    attach_drawn(model, 64)
    ids = torch.randint(2, V, (3, 6))
    mask = torch.arange(6) < torch.tensor([6, 4, 6])[:, None]
    batch = WindowBatch(ids, mask, mask, torch.where(mask, 0, -1), torch.arange(3))
    before, calls = PreviousBatch(64), []
    model.register_forward_hook(lambda _model, _args, output: calls.append(output))

    def read():
        calls.clear()
        found = validation.by_signal(model, batch, torch.Generator().manual_seed(0), before)
        return found, {name: c.uncertainty_codes for name, c in zip(found, calls, strict=True)}

    found, codes = read()
    calls.clear()
    true = validation.token_by_token(model, ids)
    recursive = torch.cat([output.uncertainty_codes for output in calls], 1)
    # A pass makes one more position what token by token gives.
    for name, exact in ((validation.NEUTRAL, 1), (validation.OWN, 2)):
        assert torch.equal(codes[name][0, :exact], recursive[0, :exact])
        assert torch.equal(codes[name][1, 4:], torch.tensor([-1, -1]))
    assert set(codes[validation.NEUTRAL][0, 1:].tolist()) == {32}
    assert set(codes[validation.ZERO].flatten().tolist()) == {-1}
    previous = codes[validation.PREVIOUS]
    assert set(previous.flatten().tolist()) == {-1, 32}
    logits = model(ids, uncertainty_codes=previous, use_cache=False).logits
    again = read()[1][validation.PREVIOUS]
    assert torch.equal(again[0, 1:], entropy_codes(logits[0, :-1], 64))
    own, shuffled = (codes[name].flatten() for name in (validation.OWN, validation.SHUFFLED))
    assert not torch.equal(own, shuffled)
    assert torch.equal(own.sort().values, shuffled.sort().values)
    replayed = model(ids[:1, :-1], uncertainty_codes=recursive[:1], use_cache=False)
    expected = -replayed.logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(true[0], expected, atol=1e-4, rtol=1e-4)

    scores = validation.Scores()
    scores.add(batch, {**found, validation.RECURSION: true})
    figures = scores.to_dict(validation.RECURSION)
    assert (figures["windows"], figures["tokens"]) == (3, 5 + 3 + 5)
    losses = found[validation.OWN]
    by_hand = sum(float(losses[row, : n - 1].sum()) for row, n in enumerate((6, 4, 6))) / 13
    assert figures["losses"][validation.OWN] == pytest.approx(by_hand, rel=1e-5)
    gap = by_hand - figures["losses"][validation.RECURSION]
    assert figures["differences"][validation.OWN]["mean"] == pytest.approx(gap, abs=1e-6)
