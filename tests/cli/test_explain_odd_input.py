"""What explain prints of odd questions, answers and corpora: something true and readable."""

import json
import re
import shutil

import pytest
import torch

import prismlm
from prismlm.cli.explain import explain_and_print
from prismlm.cli.trace import PrintOptions, repeats_question
from prismlm.corpus.chat import as_chat
from tests.helpers.chats import ANSWER, QUESTION, chatting
from tests.helpers.lens_meta import change_meta

TEXT = "The patient was given a dose of the drug"
SUPPORT = re.compile(r"^(Strong|Weak|No) support: .*\.$", re.MULTILINE)


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    return chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model")


def printed(result):
    assert result.returncode == 0, result.stderr
    assert not re.search(r"\b(nan|None|inf)\b|�", result.stdout), result.stdout
    return result.stdout


@pytest.mark.parametrize(
    "question", ["¿Qué hace el medicamento?", "这种药有什么作用?", "ماذا يفعل الدواء؟"]
)
def test_a_question_in_another_language(prism, model, question):
    shown = printed(prism("explain", model, question))
    assert shown.startswith(f"{question} → ")
    assert len(SUPPORT.findall(shown)) == 1
    # So small a model may end its text at once.
    shown = printed(prism("explain", model, question, "--chat"))
    assert shown.startswith(f"{question}\n\n")
    assert SUPPORT.search(shown) or "The model wrote nothing" in shown


def test_an_empty_answer(model, capsys):
    lm = prismlm.load(model)
    end = lm.tokenizer.eos_token_id
    # At the end of the prompt the model now expects the end of a text; its inputs stay as they are.
    state = lm.explain(as_chat(QUESTION), generate=1).predictions.states[-1]
    output = lm.model.get_output_embeddings()
    with torch.no_grad():
        weight = output.weight.clone()
        weight[end] = 100 * state / state.norm()
    output.weight = torch.nn.Parameter(weight)
    trace = explain_and_print(lm, as_chat(QUESTION), PrintOptions("domain"), generate=5)
    assert (trace.written, trace.answer) == (1, "")
    shown = capsys.readouterr().out
    assert shown.startswith(f"{QUESTION}\n\nThe model wrote nothing: it ended the text at once.\n")
    assert not SUPPORT.search(shown)
    assert "Documents behind it" not in shown


def test_an_answer_that_repeats_the_question(prism, model, tmp_path):
    chats = tmp_path / "chats.jsonl"
    for answer in (QUESTION, f"{QUESTION} {ANSWER[:20]}", ANSWER):
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        chats.write_text(json.dumps({"messages": turns}) + "\n")
        shown = printed(prism("explain", model, "--file", chats))
        assert shown.startswith(f"{QUESTION}\n\n{answer}\n")
        assert ("The answer repeats the question" in shown) == (answer != ANSWER)
    assert not repeats_question("What is malaria?", "Malaria")
    assert not repeats_question("", "")


def test_a_chat_that_ends_with_the_user_is_answered(prism, model, tmp_path):
    turns = [
        {"role": "user", "content": "Is it a drug?"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": QUESTION},
    ]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    shown = printed(prism("explain", model, "--file", chats))
    answer = prismlm.load(model).explain(turns, generate=50).answer.split()
    assert shown.startswith(f"{QUESTION}\n\n{answer[0] if answer else 'The model wrote nothing'}")
    value = json.loads(prism("explain", model, "--file", chats, "--json").stdout)
    assert value["positions"][-1]["target_from"] == "generated"
    read = printed(prism("explain", model, "--file", chats, "--generate", 0))
    assert QUESTION in read
    assert SUPPORT.search(read)


def test_a_lens_without_a_support_scale_says_how_to_get_one(prism, tiny_model, tmp_path):
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    change_meta(copy / "lens" / "sample", support=None)
    said = " ".join(printed(prism("explain", copy, TEXT)).split())
    assert "this lens has no support scale." in said
    assert "prismlm index MODEL --corpus DIR --positions 1 --overwrite" in said
    assert "Documents behind it" in said
    assert not SUPPORT.search(said)
