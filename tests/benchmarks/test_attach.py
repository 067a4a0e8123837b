"""How the demo's model is taught, and heads fitted to stored states."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.attach import demo_lessons, frontier
from prismlm.demo.texts import pairs_path
from prismlm.files import read_json
from prismlm.training.tuning import with_adapters
from tests.helpers.chats import TEMPLATE

SHORT = replace(demo_lessons.OPTIONS, rank=8, blocks=1.0, epochs=40, batch=2, learning_rate=2e-2)
FRONTIER = {"WINDOW": 64, "BATCH": 64, "RATE": 0.05, "POINTS": 2, "MEASURED": 300}


@pytest.fixture
def adapted(tiny_model):
    torch.manual_seed(0)
    return with_adapters(AutoModelForCausalLM.from_pretrained(tiny_model), SHORT)


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def lessons(tokenizer):
    pairs = pq.read_table(pairs_path()).slice(0, 12).to_pylist()
    plain = [{"answer": "An answer that stands alone.", "questions": ["What stands alone?"]}]
    return demo_lessons.Lessons(pairs, plain, ["A text that stands alone. " * 8], tokenizer, 256)


def test_no_question_is_taught_that_is_reported(tokenizer):
    rows = pq.read_table(pairs_path()).to_pylist()
    (pair,) = (row for row in rows if row["title"] == "What causes Autoimmune Hepatitis?")
    reported = demo_lessons.words("How does Autoimmune Hepatitis start?")
    assert reported in map(demo_lessons.words, demo_lessons.wordings(pair["title"]))
    asked = [one["question"] for one in demo_lessons.lines_of(demo_lessons.REPORTED)]
    assert reported in map(demo_lessons.words, asked)
    taught = demo_lessons.Lessons([pair], [], [], tokenizer, 256)
    said = {tokenizer.decode(one) for n in range(30) for ((one, _),) in taught.epoch(n, 0)}
    assert len(said) > 20
    assert not any(reported in demo_lessons.words(one) for one in said)


def test_a_row_of_several_questions_has_the_loss_of_each_by_itself(adapted, lessons):
    together = next(row for row in lessons.epoch(1, 0) if len(row) > 1)
    loss, count = demo_lessons.summed_loss(adapted, lessons.tensors([together]))
    alone = [demo_lessons.summed_loss(adapted, lessons.tensors([[pair]]))[0] for pair in together]
    assert count == sum(len(answer) for _, answer in together)
    # The model is computed in bfloat16.
    assert loss.item() == pytest.approx(float(sum(alone)), rel=2e-3)


def test_what_is_taught_is_learned(adapted, lessons):
    teaching = demo_lessons.Teaching(adapted, lessons, SHORT)
    found = [teaching.take(torch.tensor([step]).numpy())["ce"] for step in range(teaching.steps)]
    assert sum(found[-3:]) < 0.9 * sum(found[:3])


def test_a_fitted_head_does_better_than_random_states(
    tiny_model, short_corpus, tmp_path, monkeypatch, run
):
    for name, value in FRONTIER.items():
        monkeypatch.setattr(frontier, name, value)
    head = ("--prototypes", 64, "--per-token", 4, "--work", tmp_path, "--out", tmp_path / "out")
    run(frontier, "states", tiny_model, short_corpus, "--gb", 0.02, *head)
    run(frontier, "control", tiny_model, *head)
    run(frontier, "fit", tiny_model, *head, "--steps", 120)
    control, fit = (read_json(path)["points"] for path in sorted((tmp_path / "out").iterdir()))
    assert [point["step"] for point in fit] == [0, 100, 120]
    assert fit[-1]["ce"] == control[-1]["ce"]
    assert fit[-1]["recovered"] > max(fit[0]["recovered"], control[-1]["recovered"])
