"""Explanations against forward passes that know nothing of prismlm."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import prismlm
from prismlm.errors import DecompositionError, InputError
from prismlm.explain.prediction import check_sums
from prismlm.models.sidecar import weight_of

TEXT = "The patient was given a dose of the drug, and the court ruled that"


@pytest.fixture(scope="module")
def trace(lm):
    return lm.explain(TEXT, generate=6)


def test_parts_sum_to_the_logits_of_a_plain_forward_pass(lm, trace):
    ids = [step.token_id for step in trace] + [trace[-1].target_id]
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([ids])).logits[0]
    for step in trace:
        own = logits[step.position, step.target_id].item()
        parts = sum(use.contribution for use in step.prototypes) + step.residual + step.bias
        assert parts == pytest.approx(own, abs=1e-3 * max(1, abs(own)))
        assert step.logit == pytest.approx(parts, abs=1e-4)
        assert step.model_logit == pytest.approx(own, abs=1e-4)
        probability = logits[step.position].softmax(-1)[step.target_id].item()
        assert step.probability == pytest.approx(probability, abs=1e-5)


def test_contributions_from_whole_signatures(lm, trace):
    step = trace[3]
    weight = weight_of(lm.model)
    for use in step.prototypes:
        signature = weight @ lm.head.prototypes[use.id]
        expected = use.activation * signature
        assert use.contribution == pytest.approx(expected[step.target_id].item(), abs=1e-4)
        centred = (expected - expected.mean())[step.target_id].item()
        assert use.evidence == pytest.approx(centred, abs=1e-4)
        assert use.activation == pytest.approx(float(lm.head.scale) * use.cosine, rel=1e-5)


def test_shape_of_a_trace(lm, trace):
    prompt = lm.tokenizer(TEXT)["input_ids"]
    assert len(trace) == len(prompt) + 6 - 1
    sources = [step.target_from for step in trace]
    assert sources == ["text"] * (len(prompt) - 1) + ["generated"] * 6
    assert [s.token_id for s in trace[: len(prompt)]] == prompt
    for before, after in pairwise(trace):
        assert before.target_id == after.token_id
    assert len(trace[2:5]) == 3
    assert trace[2:5][0] == trace[2]


def test_without_generation_the_last_target_is_the_top_token(lm):
    trace = lm.explain(TEXT)
    ids = torch.tensor([[step.token_id for step in trace]])
    with torch.no_grad():
        top = lm.model(input_ids=ids).logits[0, -1].argmax().item()
    assert trace[-1].target_from == "argmax"
    assert trace[-1].target_id == top


def test_generation_is_the_models_own_and_seeded(lm):
    ids = torch.tensor([lm.tokenizer(TEXT)["input_ids"]])
    greedy = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False
    )
    trace = lm.explain(TEXT, generate=5)
    assert [s.target_id for s in trace if s.target_from == "generated"] == greedy[
        0, ids.shape[1] :
    ].tolist()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    once = lm.generate(TEXT, tokens=8, temperature=1.0, seed=3)
    assert once == lm.generate(TEXT, tokens=8, temperature=1.0, seed=3)
    assert once != lm.generate(TEXT, tokens=8, temperature=1.0, seed=4)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("text", "generate", "words"),
    [("", 0, "empty"), ("word " * 3000, 0, "shorten it"), ("Hello", 100_000, "to generate")],
)
def test_text_that_cannot_be_explained(lm, text, generate, words):
    with pytest.raises(InputError, match=words):
        lm.explain(text, generate=generate)


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_parts_that_do_not_add_up_are_refused(wrong):
    own = torch.tensor([1.0, 5.0])
    check_sums(own + 0.0009, own, torch.float32)
    with pytest.raises(DecompositionError, match="position 1"):
        check_sums(own * torch.tensor([1.0, wrong]), own, torch.float32)
    # The model's own are of the last positions.
    with pytest.raises(DecompositionError, match="position 3"):
        check_sums(torch.tensor([0.0, 9.0, 1.0, 5 * wrong]), own, torch.float32)


def test_a_model_without_a_lens(lm):

    trace = replace(lm, lens=None).explain("Hello there")
    assert trace.to_dict()["sources"] is None
    with pytest.raises(InputError, match="prismlm index"):
        trace.sources()


def test_a_bfloat16_model_is_split_within_its_rounding(tiny_model, tmp_path):
    from prismlm.models.sidecar import Sidecar, base_of, load_sidecar, save_sidecar

    lm = prismlm.load(tiny_model)
    assert 0 < rounding(lm.explain(TEXT)) < 1e-4
    model = lm.model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    sidecar = load_sidecar(tiny_model)
    save_sidecar(tmp_path, Sidecar(sidecar.head, sidecar.logit_map, base_of(model)))
    low = prismlm.load(tmp_path)
    assert low.model.dtype == torch.bfloat16
    assert 1e-4 < rounding(low.explain(TEXT)) < 2e-2


def rounding(trace):
    return max(abs(s.logit - s.model_logit) / max(1, abs(s.model_logit)) for s in trace)
