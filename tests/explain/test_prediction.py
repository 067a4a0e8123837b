"""Explanations against forward passes that know nothing of prismlm; as tables; citations."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch

import prismlm
from prismlm.errors import DecompositionError, InputError
from prismlm.explain.attribution import Share, Sources
from prismlm.explain.prediction import OutputLayer, Parts, check_sums
from prismlm.lens.lens import sentences
from prismlm.models.seam import LogitMap
from prismlm.models.sidecar import weight_of
from prismlm.ops.prototype_head import route
from tests.explain.conftest import shares_of

TEXT = "The patient was given a dose of the drug, and the court ruled that"


@pytest.fixture(scope="module")
def trace(lm):
    return lm.explain(TEXT, generate=6)


def test_parts_sum_to_the_logits_of_a_plain_forward_pass(lm, trace):
    ids = [step.token_id for step in trace] + [trace[-1].target_id]
    with torch.no_grad():
        logits = lm.model(input_ids=torch.tensor([ids])).logits[0]
    for step, row in zip(trace, logits, strict=False):
        own, probability = row[step.target_id].item(), row.softmax(-1)[step.target_id].item()
        parts = sum(use.contribution for use in step.prototypes) + step.residual + step.bias
        assert parts == pytest.approx(own, abs=1e-3 * max(1, abs(own)))
        assert step.logit == pytest.approx(parts, abs=1e-4)
        assert step.model_logit == pytest.approx(own, abs=1e-4)
        assert step.probability == pytest.approx(probability, abs=1e-5)
    step, weight = trace[3], weight_of(lm.model)
    for use in step.prototypes:
        expected = use.activation * (weight @ lm.head.prototypes[use.id])
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
    assert all(before.target_id == after.token_id for before, after in pairwise(trace))
    assert len(trace[2:5]) == 3
    assert trace[2:5][0] == trace[2]
    # Without generation the last target is the top token.
    read = lm.explain(TEXT)
    with torch.no_grad():
        top = lm.model(torch.tensor([prompt])).logits[0, -1].argmax().item()
    assert (read[-1].target_from, read[-1].target_id) == ("argmax", top)


def test_generation_is_the_models_own_and_seeded(lm):
    ids = lm.encode(TEXT)
    greedy = lm.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    assert lm.explain(TEXT, generate=5).answer_ids == greedy.tolist()
    torch.manual_seed(7)
    state = torch.get_rng_state()
    once = lm.generate(TEXT, tokens=8, temperature=1.0, seed=3)
    assert once == lm.generate(TEXT, tokens=8, temperature=1.0, seed=3)
    assert once != lm.generate(TEXT, tokens=8, temperature=1.0, seed=4)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_parts_that_do_not_add_up_are_refused(wrong):
    own = torch.tensor([1.0, 5.0])
    check_sums(own + 0.0009, own, torch.float32)
    # The model's own are of the last positions.
    for parts, position in (([1.0, 5 * wrong], 1), ([0.0, 9.0, 1.0, 5 * wrong], 3)):
        with pytest.raises(DecompositionError, match=f"position {position}"):
            check_sums(torch.tensor(parts), own, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 0, 1e-4), ("bfloat16", 1e-4, 0.02)]
)
def test_a_model_is_split_within_its_rounding(small_model, dtype, least, most):
    lm = prismlm.load(small_model)
    lm.model.to(getattr(torch, dtype))
    trace = replace(lm, lens=None).explain(TEXT)
    errors = (abs(s.logit - s.model_logit) / max(1, abs(s.model_logit)) for s in trace)
    assert least < max(errors) < most


def naive_parts(z, routing, prototypes, weight, targets, *, scale, bias):
    """Split logits through whole vocabulary vectors W p_i and W r, one state at a time."""
    rows = []
    for state, index, activation, target in zip(
        z, routing.indices, routing.activations, targets, strict=True
    ):
        signatures = scale * activation[:, None] * (prototypes[index] @ weight.T)
        rest = scale * (weight @ (state - activation @ prototypes[index]))
        both = (
            (one[..., target], (one - one.mean(-1, keepdim=True))[..., target])
            for one in (signatures, rest, bias)
        )
        rows.append([part for pair in both for part in pair])
    return Parts(*(torch.stack(column) for column in zip(*rows, strict=True)))


def test_parts_sum_and_equal_naive():
    generator = torch.Generator().manual_seed(0)
    z, prototypes, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((7, 12), (20, 12), (33, 12), (33,))
    )
    targets = torch.randint(33, (7,), generator=generator)
    routing = route(z, prototypes, 5, 1.3)
    output = OutputLayer(weight, bias / 0.7, weight.mean(0), LogitMap(0.7), weight.dtype)
    parts = output.parts(prototypes, z, routing, targets)
    slow = naive_parts(z, routing, prototypes, weight, targets, scale=0.7, bias=bias)
    torch.testing.assert_close(parts, slow)
    logits = 0.7 * (z @ weight.T) + bias
    torch.testing.assert_close(parts.logit, logits.gather(1, targets[:, None])[:, 0])
    centred = logits - logits.mean(1, keepdim=True)
    evidence = parts.evidence.sum(1) + parts.residual_evidence + parts.bias_evidence
    torch.testing.assert_close(evidence, centred.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(parts.explained_share, parts.evidence.sum(1) / evidence)


# -- tables and citations


def test_passages_shares_and_steps_as_data_frames_parquet_and_json(lm, trace, tmp_path):
    passages, shares = trace.passages(4), trace.sources("domain")
    assert passages.to_pandas()["share"].tolist() == [one.share for one in passages]
    page = passages._repr_html_()
    assert page.count("<tr>") == 4
    assert f"{passages[0].share:.3g}" in page
    frame = shares.to_pandas()
    assert frame["share"].sum() == pytest.approx(1.0)
    assert frame["domain"].tolist()[-1] == "unattributed"
    assert f"{shares.items[0].share:.3g}" in shares._repr_html_()
    frame = trace.to_pandas()
    trace.to_parquet(tmp_path / "t.parquet")
    assert frame.to_dict("list").keys() == pq.read_table(tmp_path / "t.parquet").to_pydict().keys()
    assert len(frame) == sum(len(step.prototypes) for step in trace)
    trace.to_json(tmp_path / "t.json")
    value = json.loads((tmp_path / "t.json").read_text())
    assert len(value["positions"]) == len(trace)
    shares = sum(shares_of(value["sources"]["items"]).values())
    assert shares + value["sources"]["unattributed"] == pytest.approx(1.0, abs=1e-6)
    without = replace(lm, lens=None).explain("Hello there")
    assert without.to_dict()["sources"] is None
    with pytest.raises(InputError, match="prismlm index"):
        without.sources()


def test_text_stays_text():
    shares = Sources("domain", (Share("<script>alert(1)</script> \u202e", 0.25),), 0.75)
    page = shares._repr_html_()
    assert "&lt;script&gt;" in page
    assert not {"<script>", "\u202e"} & {*page.split(), *page}
    # A column that nothing has is left out.
    assert "lift" not in page


def naive(trace):
    """Of each sentence, the documents that carry s ≥ 0.8 of it: by loops over its tokens."""
    told, ids = trace.attribution("evidence").coverage, trace.answer_ids
    words = [len(trace.lm.words(ids[:count])) for count in range(len(ids) + 1)]
    shift = 0 if trace.first or trace.written else 1
    expected = set()
    for start, end in sentences(trace.answer):
        spelt = (t for t in range(shift, len(ids)) if words[t + 1] > start and words[t] < end)
        inside, carried = {token - shift for token in spelt}, defaultdict(set)
        tokens = {int(told.tokens[one]): float(told.weights[one]) for one in inside}
        for prediction, document, _ in told.carried.tolist():
            if prediction in inside and sum(tokens.values()) >= 1:
                carried[document].add(int(told.tokens[prediction]))
        for document, its in carried.items():
            share = sum(tokens[token] for token in its) / sum(tokens.values())
            if share >= 0.8:
                doc_id = trace.lens.cells.facts(document)["doc_id"]
                expected.add((start, end, doc_id, round(share, 6)))
    return expected


def test_a_sentence_cites_the_documents_that_carry_nearly_all_of_it(lm):
    corpus, cited = lm.lens.corpus, 0
    for number in (0, 3, 6, 30):
        text = corpus.text(number)[:300]
        whole = lm.explain(text)
        for trace in (whole, lm.explain(text[:40], generate=30), whole[5:]):
            marks = [
                (*one[:2], one.document["doc_id"], round(one.share, 6)) for one in trace.citations()
            ]
            assert set(marks) == naive(trace)
            assert len(set(marks)) == len(marks)
            assert marks == sorted(marks, key=lambda mark: (mark[0], -mark[3]))
            cited += len(marks)
    assert cited > 10
