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
from prismlm.training.setup import PreviousBatch
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
    before, calls = PreviousBatch(64), []
    model.register_forward_hook(lambda _model, _args, output: calls.append(output))

    def read():
        calls.clear()
        drawn = torch.Generator().manual_seed(0)
        found = uncertainty_validation.by_signal(model, batch, drawn, before)
        return found, {name: c.uncertainty_codes for name, c in zip(found, calls, strict=True)}

    found, codes = read()
    calls.clear()
    true = uncertainty_validation.token_by_token(model, ids)
    recursive = torch.cat([output.uncertainty_codes for output in calls], 1)
    # A pass makes one more position what token by token gives.
    for name, exact in ((NEUTRAL, 1), (OWN, 2)):
        assert torch.equal(codes[name][0, :exact], recursive[0, :exact])
        assert torch.equal(codes[name][1, 4:], torch.tensor([-1, -1]))
    assert set(codes[NEUTRAL][0, 1:].tolist()) == {32}
    assert set(codes[ZERO].flatten().tolist()) == {-1}
    assert set(codes[PREVIOUS].flatten().tolist()) == {-1, 32}
    logits = model(ids, uncertainty_codes=codes[PREVIOUS], use_cache=False).logits
    assert torch.equal(read()[1][PREVIOUS][0, 1:], entropy_codes(logits[0, :-1], 64))
    assert not torch.equal(codes[OWN], codes[SHUFFLED])
    own, shuffled = (codes[name].flatten().sort().values for name in (OWN, SHUFFLED))
    assert torch.equal(own, shuffled)
    replayed = model(ids[:1, :-1], uncertainty_codes=recursive[:1], use_cache=False)
    expected = -replayed.logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(true[0], expected, atol=1e-4, rtol=1e-4)

    scores = uncertainty_validation.Scores()
    scores.add(batch, {**found, RECURSION: true})
    figures = scores.to_dict(RECURSION)
    assert (figures["windows"], figures["tokens"]) == (3, 5 + 3 + 5)
    by_hand = sum(float(found[OWN][row, : n - 1].sum()) for row, n in enumerate((6, 4, 6)))
    assert figures["losses"][OWN] == pytest.approx(by_hand / 13, rel=1e-5)
    gap = figures["losses"][OWN] - figures["losses"][RECURSION]
    assert figures["differences"][OWN]["mean"] == pytest.approx(gap, abs=1e-6)
