"""Questions that lie in one row are learned as each by itself."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attach.demo_lessons import (
    ALL_FROM,
    CUT_AFTER,
    OPTIONS,
    REPORTED,
    Lessons,
    Teaching,
    lines_of,
    start_as,
    summed_loss,
    wordings,
    words,
)
from prismlm.demo.texts import pairs_path
from prismlm.training.tuning import with_adapters, write_adapter
from tests.helpers.chats import TEMPLATE

SHORT = replace(OPTIONS, rank=8, blocks=1.0, epochs=40, batch=2, learning_rate=2e-2)


@pytest.fixture
def adapted(tiny_model):
    torch.manual_seed(0)
    return with_adapters(AutoModelForCausalLM.from_pretrained(tiny_model), SHORT)


@pytest.fixture(scope="module")
def lessons(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    pairs = pq.read_table(pairs_path()).slice(0, 12).to_pylist()
    plain = [{"answer": "An answer that stands alone.", "questions": ["What stands alone?"]}]
    return Lessons(pairs, plain, ["A text that stands alone. " * 8], tokenizer, 256)


def test_no_question_is_taught_that_is_reported(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    rows = pq.read_table(pairs_path()).to_pylist()
    (pair,) = (row for row in rows if row["title"] == "What causes Autoimmune Hepatitis?")
    reported = words("How does Autoimmune Hepatitis start?")
    assert reported in map(words, wordings(pair["title"]))
    assert reported in {words(one["question"]) for one in lines_of(REPORTED)}
    taught = Lessons([pair], [], [], tokenizer, 256)
    said = {tokenizer.decode(one) for n in range(30) for ((one, _),) in taught.epoch(n, 0)}
    assert len(said) > 20
    assert not any(reported in words(one) for one in said)


def test_a_row_of_several_questions_has_the_loss_of_each_by_itself(adapted, lessons):
    together = next(row for row in lessons.epoch(1, 0) if len(row) > 1)
    loss, count = summed_loss(adapted, lessons.tensors([together]))
    alone = [summed_loss(adapted, lessons.tensors([[pair]])) for pair in together]
    assert count == sum(tokens for _, tokens in alone)
    assert count == sum(len(answer) for _, answer in together)
    # The model is computed in bfloat16.
    assert loss.item() == pytest.approx(sum(one.item() for one, _ in alone), rel=2e-3)


def test_what_is_taught_is_learned(adapted, lessons):
    teaching = Teaching(adapted, lessons, SHORT)
    found = [teaching.take(torch.tensor([step]).numpy())["ce"] for step in range(teaching.steps)]
    assert sum(found[-3:]) < 0.9 * sum(found[:3])


def test_late_questions_are_also_in_lower_case_and_late_answers_also_cut(lessons, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    early = [pair for row in lessons.epoch(ALL_FROM - 1, 0) for pair in row if pair[0]]
    late = [p for n in range(6) for row in lessons.epoch(ALL_FROM + n, 0) for p in row if p[0]]
    assert all(answer[-len(end) :] == end for _, answer in early)
    cut = [answer for _, answer in late if answer[-len(end) :] != end]
    assert 0.3 < len(cut) / len(late) < 0.7
    assert {len(answer) for answer in cut} <= set(range(CUT_AFTER[0], CUT_AFTER[1] + 1))
    questions = [tokenizer.decode(asked).partition("<|im_end|>")[0] for asked, _ in late]
    assert 0.1 < sum(one == one.lower() for one in questions) / len(questions) < 0.5


def test_adapters_of_a_larger_rank_start_as_those_of_before(adapted, tiny_model, tmp_path):
    random = torch.Generator().manual_seed(0)
    learned = [one for one in adapted.parameters() if one.requires_grad]
    with torch.no_grad():
        for one in learned:
            one.normal_(std=0.1, generator=random)
    write_adapter(learned, adapted, "tiny", tmp_path / "former", {})
    larger = with_adapters(
        AutoModelForCausalLM.from_pretrained(tiny_model), replace(SHORT, rank=12)
    )
    ids = torch.tensor([[3, 5, 7]])
    before = larger(ids).logits
    start_as(larger, tmp_path / "former")
    torch.testing.assert_close(larger(ids).logits, adapted.float()(ids).logits)
    assert not torch.allclose(larger(ids).logits, before, atol=1e-2)
