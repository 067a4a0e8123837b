"""Questions and chats on the command line, run as processes."""

import json

import pyarrow.parquet as pq
import pytest

import prismlm
from prismlm.corpus import Corpus
from prismlm.corpus.chat import as_chat
from tests.helpers.chats import ANSWERED, ASKED, CHAT, QUESTION, chatting


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    return chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def lm(model):
    return prismlm.load(model)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text(json.dumps({"id": "one", "domain": "medicine", "messages": CHAT}) + "\n")
    return path


def done(result):
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_question_is_explained_with_its_answer(prism, model, lm):
    value = json.loads(done(prism("explain", model, QUESTION, "--chat", "--json")))
    expected = lm.explain(as_chat(QUESTION), generate=50).to_dict(by="domain", documents=5)
    assert value == json.loads(json.dumps(expected))
    told = ("--chat", "--system", "Be brief.", "--generate", 2, "--json")
    value = json.loads(done(prism("explain", model, QUESTION, *told)))
    expected = lm.explain(as_chat(QUESTION, "Be brief."), generate=2)
    assert len(value["positions"]) == len(expected)


def test_the_answer_alone_is_generated(prism, model, lm):
    said = done(prism("generate", model, QUESTION, "--chat", "--tokens", 6))
    assert said.rstrip("\n") == lm.generate(ASKED, tokens=6)[len(ASKED) :].rstrip("\n")


def test_files_of_chats_are_explained_and_audited_by_their_answers(prism, model, lm, chats):
    trace = lm.explain(CHAT)
    value = json.loads(done(prism("explain", model, "--file", chats, "--json")))
    assert value["summary"] == trace.summary
    rows = chats.with_name("rows.parquet")
    done(prism("audit", model, chats, "--parquet", rows, "--overwrite"))
    (row,) = pq.read_table(rows).to_pylist()
    assert (row["text_id"], row["opening"]) == ("one", QUESTION)
    assert row["predictions"] == len(trace) - trace.first - 1
    compared = json.loads(done(prism("compare", model, model, "--file", chats, "--json")))
    assert compared["texts"]["predictions"] == row["predictions"]
    document = row["documents"][0]["doc_id"]
    found = json.loads(done(prism("sources", model, "--doc", document, "--file", chats, "--json")))
    assert found["texts"][0]["opening"] == QUESTION


@pytest.fixture(scope="module")
def unanswered(chats):
    """Return a file of the chat, and of two more that end with a question."""
    asked_again = [*CHAT, {"role": "user", "content": QUESTION}]
    rows = [{"id": f"{n}", "messages": one} for n, one in enumerate([CHAT[:-1], CHAT, asked_again])]
    path = chats.with_name("unanswered.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


UNANSWERED = {"chat without an answer": 2}


def test_a_chat_that_ends_with_a_question_is_left_out_of_an_audit_and_counted(
    prism, model, chats, unanswered
):
    found, alone = (
        json.loads(done(prism("audit", model, file, "--json"))) for file in (unanswered, chats)
    )
    assert found["left_out"] == UNANSWERED
    assert [found[name] for name in ("texts", "predictions")] == [1, alone["predictions"]]
    compared = json.loads(done(prism("compare", model, model, "--file", unanswered, "--json")))
    assert compared["texts"]["left_out"] == UNANSWERED
    assert compared["texts"]["predictions"] == alone["predictions"]


def test_a_corpus_is_built_of_chats(prism, model, chats, tmp_path):
    arguments = ("corpus", "build", chats, "--out", tmp_path / "c", "--tokenizer", model)
    json.loads(done(prism(*arguments, "--dry-run", "--json")))
    done(prism(*arguments, "--heldout", 0))
    corpus = Corpus.open(tmp_path / "c")
    assert [corpus.text(0), corpus.column("domain")] == [ANSWERED, ["medicine"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", QUESTION, "--system", "Be brief."), "--system is a system prompt"),
        (("generate", QUESTION, "--system", "Be brief."), "--system is a system prompt"),
        (("explain", QUESTION, "--chat"), "has no chat template"),
        (("generate", QUESTION, "--chat"), "has no chat template"),
        (("explain", " ", "--chat"), "the question is empty"),
    ],
)
def test_what_cannot_be_asked_is_refused(refused, tiny_model, arguments, said):
    command, *others = arguments
    assert said in refused(command, tiny_model, *others)


def test_chats_for_a_model_that_knows_none_are_refused(refused, tiny_model, chats, tmp_path):
    for arguments in (("explain", tiny_model, "--file", chats), ("audit", tiny_model, chats)):
        said = refused(*arguments)
        assert "chats.jsonl:1" in said
        assert "no chat template" in said
    said = refused("corpus", "build", chats, "--out", tmp_path / "c", "--vocab-size", 300)
    assert "has no text but messages" in said
    assert not (tmp_path / "c").exists()
