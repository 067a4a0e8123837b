"""Questions, chats, and odd questions and answers on the command line."""

import json
import re
import shutil

import pyarrow.parquet as pq
import pytest
import torch

import prismlm
from prismlm.cli.trace import PrintOptions, explain_and_print
from prismlm.corpus.chat import as_chat
from tests.helpers.chats import ANSWER, ASKED, CHAT, QUESTION, chatting
from tests.helpers.lens_files import change_meta

SUPPORT = re.compile(r"^(Strong|Weak|No) support: .*\.$", re.MULTILINE)
UNANSWERED = {"chat without an answer": 2}


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    return chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def lm(model):
    return prismlm.load(model)


def write_chats(path, *chats, **columns):
    rows = [{"id": f"{n}", "messages": messages} | columns for n, messages in enumerate(chats)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return write_chats(path, CHAT, domain="medicine")


@pytest.fixture
def printed(prism):
    """Run explain, and return what it prints, which has no undefined figures."""

    def run(*arguments):
        shown = prism("explain", *arguments).stdout
        assert not re.search(r"\b(nan|None|inf)\b|�", shown), shown
        return shown

    return run


def test_a_question_is_explained_with_its_answer(document, model, lm):
    value = document("explain", model, QUESTION, "--chat")
    expected = lm.explain(as_chat(QUESTION), generate=50).to_dict(by="domain", documents=5)
    assert value == json.loads(json.dumps(expected))
    options = ("--chat", "--system", "Be brief.", "--generate", 2)
    value = document("explain", model, QUESTION, *options)
    assert len(value["positions"]) == len(lm.explain(as_chat(QUESTION, "Be brief."), generate=2))


def test_a_steered_answer_is_shown_without_its_prompt(prism, document, model):
    how = ("steer", model, QUESTION, "--chat", "--prototype", 7, "--edit", "ablate")
    how = (*how, "--heldout", 0, "--temperature", 1, "--generate")
    steering = document(*how, 4)
    shown = prism(*how, 4).stdout
    assert QUESTION in steering["prompt"]
    assert QUESTION not in shown
    answer = steering["text"].removeprefix(steering["prompt"])
    assert answer.strip()
    assert " ".join(shown.split()).startswith(" ".join(f"ablate prototype 7 with {answer}".split()))
    # Without an answer, what is read.
    assert QUESTION in prism(*how, 0).stdout


def test_only_the_answer_is_generated(prism, model, lm):
    shown = prism("generate", model, QUESTION, "--chat", "--tokens", 6).stdout
    assert shown.rstrip("\n") == lm.generate(ASKED, tokens=6)[len(ASKED) :].rstrip("\n")


def test_files_of_chats_are_explained_and_audited_by_their_answers(document, model, lm, chats):
    trace = lm.explain(CHAT)
    assert document("explain", model, "--file", chats)["summary"] == trace.summary
    rows = chats.with_name("rows.parquet")
    alone = document("audit", model, chats, "--parquet", rows, "--overwrite")
    (row,) = pq.read_table(rows).to_pylist()
    assert (row["text_id"], row["opening"]) == ("0", QUESTION)
    assert row["predictions"] == alone["predictions"] == len(trace) - trace.first - 1
    doc = row["documents"][0]["doc_id"]
    value = document("sources", model, "--doc", doc, "--file", chats)
    assert value["texts"][0]["opening"] == QUESTION
    # Chats that end with a question are left out.
    asked_again = [*CHAT, {"role": "user", "content": QUESTION}]
    unanswered = write_chats(chats.with_name("unanswered.jsonl"), CHAT[:-1], CHAT, asked_again)
    value = document("audit", model, unanswered)
    assert (value["left_out"], value["texts"]) == (UNANSWERED, 1)
    compared = document("compare", model, model, "--file", unanswered)["texts"]
    assert compared["left_out"] == UNANSWERED
    assert value["predictions"] == compared["predictions"] == alone["predictions"]


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("explain", (QUESTION, "--system", "Be brief."), "--system is a system prompt"),
        ("generate", (QUESTION, "--chat"), "has no chat template"),
        ("explain", (" ", "--chat"), "the question is empty"),
    ],
)
def test_bad_questions_are_refused(refused, tiny_model, command, arguments, words):
    assert words in refused(command, tiny_model, *arguments)


def test_chats_that_cannot_be_used_are_refused(refused, model, tiny_model, chats):
    for arguments in (("explain", tiny_model, "--file", chats), ("audit", tiny_model, chats)):
        message = refused(*arguments)
        assert "chats.jsonl:1" in message
        assert "chat template" in message
    assert "only chats" in refused("explain", model, "--file", chats, "--system", "Be brief.")


def test_a_question_in_another_language(printed, model):
    question = "ماذا يفعل الدواء؟"
    shown = printed(model, question)
    assert shown.startswith(f"{question} → ")
    assert len(SUPPORT.findall(shown)) == 1
    # So small a model may end its text at once.
    shown = printed(model, question, "--chat")
    assert shown.startswith(f"{question}\n\n")
    assert SUPPORT.search(shown) or "The model wrote nothing" in shown


def test_an_empty_answer(model, capsys, monkeypatch):
    lm = prismlm.load(model)
    end = torch.tensor([[lm.tokenizer.eos_token_id]])
    monkeypatch.setattr(lm.model, "generate", lambda inputs, **_: torch.cat([inputs, end], 1))
    trace = explain_and_print(lm, as_chat(QUESTION), PrintOptions("domain"), generate=5)
    assert (trace.written, trace.answer) == (1, "")
    shown = capsys.readouterr().out
    assert shown.startswith(f"{QUESTION}\n\nThe model wrote nothing: it ended the text at once.\n")
    assert not SUPPORT.search(shown)
    assert "Documents behind it" not in shown


def test_an_answer_that_repeats_the_question(printed, model, tmp_path):
    for answer in (QUESTION, f"{QUESTION} {ANSWER[:20]}", ANSWER):
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        shown = printed(model, "--file", write_chats(tmp_path / "chats.jsonl", turns))
        assert shown.startswith(f"{QUESTION}\n\n{answer}\n")
        assert ("The answer repeats the question" in shown) == (answer != ANSWER)


def test_a_chat_that_ends_with_the_user_is_answered(printed, document, model, lm, tmp_path):
    turns = [
        {"role": "user", "content": "Is it a drug?"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": QUESTION},
    ]
    chats = write_chats(tmp_path / "chats.jsonl", turns)
    answer = lm.explain(turns, generate=50).answer.split()
    begin = f"{QUESTION}\n\n{answer[0] if answer else 'The model wrote nothing'}"
    assert printed(model, "--file", chats).startswith(begin)
    value = document("explain", model, "--file", chats)
    assert value["positions"][-1]["target_from"] == "generated"
    shown = printed(model, "--file", chats, "--generate", 0)
    assert QUESTION in shown
    assert SUPPORT.search(shown)


def test_a_lens_without_a_support_scale_says_how_to_get_one(printed, tiny_model, tmp_path):
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    change_meta(copy / "lens" / "sample", support=None)
    shown = " ".join(printed(copy, "The patient was given a dose of the drug").split())
    assert "this lens has no support scale." in shown
    assert "prismlm index MODEL --corpus DIR --positions 1 --overwrite" in shown
    assert "Documents behind it" in shown
    assert not SUPPORT.search(shown)
