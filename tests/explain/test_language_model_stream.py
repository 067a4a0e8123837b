"""Steps told while a model writes, against those of the finished trace."""

import pytest
import torch

from prismlm.explain import language_model
from prismlm.explain.language_model import StepStream
from prismlm.explain.prediction import Recorded

TEXT = "The patient was given a dose of the drug, and the court ruled that"


def test_steps_told_are_those_of_the_trace_in_order_and_one_by_one(lm):
    told = []
    trace = lm.explain(TEXT, generate=8, on_step=told.append)
    assert [step.position for step in told] == list(range(len(trace)))
    for live, final in zip(told, trace, strict=True):
        assert live.pieces == final.pieces
        assert live.target_from == final.target_from
        assert live.logit == pytest.approx(final.logit, abs=1e-4)
        assert [use.id for use in live.prototypes] == [use.id for use in final.prototypes]
        assert [use.name for use in live.prototypes] == [use.name for use in final.prototypes]


def test_false_ends_the_writing_there(lm):
    told = []

    def three(step):
        told.append(step)
        return sum(step.target_from == "generated" for step in told) < 3

    trace = lm.explain(TEXT, generate=20, on_step=three)
    assert sum(step.target_from == "generated" for step in trace) == 3
    assert len(told) == len(trace)
    assert trace.to_dict() == lm.explain(TEXT, generate=3).to_dict()


def test_false_in_the_prompt_leaves_it_whole_and_one_token(lm):
    trace = lm.explain(TEXT, generate=20, on_step=lambda step: step.position < 2)
    assert trace.to_dict() == lm.explain(TEXT, generate=1).to_dict()


def test_a_character_of_several_tokens_is_told_once_it_is_whole(lm, monkeypatch):
    """The model's own passes over a text, as if it had just written it."""
    ids = lm.encode("a 東京 b")
    told = []
    recorded = Recorded([], [], [], [])
    monkeypatch.setattr(language_model, "REPORT_INTERVAL", 0.0)
    follow = StepStream(lm, recorded, 1, told.append)
    shown = []
    with torch.no_grad():
        for length in range(1, ids.shape[1]):
            hidden = lm.model(input_ids=ids[:, :length], output_hidden_states=True)
            z = hidden.hidden_states[-1][:, -1:]
            recorded.states.append(z)
            recorded.input_ids.append(ids[:, length - 1 : length])
            recorded.raw_logits.append(lm.model.get_output_embeddings()(z))
            follow(ids[:, : length + 1])
            shown.append("".join(step.pieces[1].shown for step in told))
    follow.finish(ids)
    assert not any("\ufffd" in text for text in shown)
    assert "".join(step.pieces[1].shown for step in told) == lm.tokenizer.decode(ids[0, 1:])
    assert any(step.pieces[1].count > 1 for step in told)
