"""What a model is fed, signal by signal."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.uncertainty_feedback import validation as uncertainty_validation
from benchmarks.uncertainty_feedback.validation import (
    NEUTRAL,
    OWN,
    PREVIOUS,
    RECURSION,
    SHUFFLED,
    ZERO,
)
from prismlm.corpus.windows import WindowBatch
from prismlm.ops.uncertainty_feedback import entropy_codes
from prismlm.training.callbacks import PreviousBatch
from tests.helpers.feedback_families import FAMILIES, V, attach_drawn


def batch_of(ids, lengths):
    mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
    document = torch.arange(len(ids))
    return WindowBatch(ids, mask, mask, torch.where(mask, 0, -1), document)


def test_signals_are_what_they_are_called():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"]()).eval()
    attach_drawn(model, 64)
    ids = torch.randint(2, V, (3, 6))
    batch = batch_of(ids, [6, 4, 6])
    before = PreviousBatch(64)
    found = uncertainty_validation.by_signal(model, batch, torch.Generator().manual_seed(0), before)
    true = uncertainty_validation.token_by_token(model, ids)
    # A pass makes one more position what token by token gives.
    for name, exact in ((NEUTRAL, 1), (OWN, 2)):
        assert torch.equal(found[name].codes[0, :exact], true.codes[0, :exact])
        assert torch.equal(found[name].codes[1, 4:], torch.tensor([-1, -1]))
    assert set(found[NEUTRAL].codes[0, 1:].tolist()) == {32}
    assert set(found[ZERO].codes.flatten().tolist()) == {-1}
    assert set(found[PREVIOUS].codes.flatten().tolist()) == {-1, 32}
    drawn = torch.Generator().manual_seed(0)
    again = uncertainty_validation.by_signal(model, batch, drawn, before)[PREVIOUS].codes
    logits = model(ids, uncertainty_codes=found[PREVIOUS].codes, use_cache=False).logits
    assert torch.equal(again[0, 1:], entropy_codes(logits[0, :-1], 64))
    own, shuffled = found[OWN].codes, found[SHUFFLED].codes
    assert not torch.equal(own, shuffled)
    assert torch.equal(own.flatten().sort().values, shuffled.flatten().sort().values)
    replayed = model(ids[:1], uncertainty_codes=true.codes[:1], use_cache=False)
    expected = -replayed.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(true.losses[0], expected, atol=1e-4, rtol=1e-4)

    scores = uncertainty_validation.Scores()
    scores.add(batch, {**found, RECURSION: true})
    figures = scores.to_dict(RECURSION)
    assert (figures["windows"], figures["tokens"]) == (3, 5 + 3 + 5)
    by_hand = sum(float(found[OWN].losses[row, : n - 1].sum()) for row, n in enumerate((6, 4, 6)))
    assert figures["losses"][OWN] == pytest.approx(by_hand / 13, rel=1e-5)
    gap = figures["losses"][OWN] - figures["losses"][RECURSION]
    assert figures["differences"][OWN]["mean"] == pytest.approx(gap, abs=1e-6)
