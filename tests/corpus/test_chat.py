"""Messages as texts, and rows of them as documents of a corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from prismlm.corpus import Columns, Document, build_corpus, estimate_build, load_tokenizer
from prismlm.corpus.chat import asked, chat_text
from prismlm.corpus.read import DocumentReader
from prismlm.errors import InputError
from tests.helpers.chats import ANSWER, ANSWERED, ASKED, CHAT, QUESTION, SHARED, TEMPLATE


@pytest.fixture(scope="module")
def directory(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny corpus's tokenizer with a chat template."""
    tokenizer = load_tokenizer(tiny_corpus / "tokenizer")
    tokenizer.chat_template = TEMPLATE
    place = tmp_path_factory.mktemp("chat") / "tokenizer"
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(directory)


def test_a_question_ends_where_its_answer_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    assert chat_text(tokenizer, asked(QUESTION)) == ASKED
    told = chat_text(tokenizer, asked("Why?", "Be brief."))
    assert told == "<system>\nBe brief.<|endoftext|>\n<user>\nWhy?<|endoftext|>\n<assistant>\n"


def test_an_answer_is_closed_or_left_open_to_be_written_on(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert chat_text(tokenizer, CHAT) == ANSWERED
    assert chat_text(tokenizer, CHAT, continue_final=True) == ASKED + ANSWER


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], r"\[\], expected a list with at least one"),
        ("Why?", "'Why\\?', expected a list"),
        ([{"role": "user"}], "number 0 is .*, expected a record with role and content"),
        ([*CHAT, "Why?"], "number 2 is 'Why\\?'"),
        ([{"role": "user", "content": ["Why?"]}], "the content of number 0 is .* one text"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ([{"role": "tool", "content": "4"}], "refuses the messages .*Tools are not known here"),
    ],
)
def test_what_is_no_chat_is_refused(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        chat_text(tokenizer, messages)


def test_without_a_template_there_are_no_chats(tiny_corpus: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer has no chat template.*chat_template\.jinja"):
        chat_text(load_tokenizer(tiny_corpus / "tokenizer"), CHAT)


def test_rows_of_messages_are_read_by_the_template(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    # Where others have tool calls, a table has nulls.
    rows = [{**message, "tool_calls": None} for message in CHAT]
    pq.write_table(pa.table({"messages": [rows], "domain": ["medicine"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"id": "b", "messages": CHAT}) + "\n")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "Plain.", "messages": CHAT}) + "\n")
    reader = DocumentReader(tmp_path, tokenizer=tokenizer)
    first, second, third = reader
    assert [first.text, second.text, third.text] == [ANSWERED, ANSWERED, "Plain."]
    assert (first.domain, first.opening, second.doc_id) == ("medicine", QUESTION, "b")
    assert (second.messages, third.messages, third.opening) == (CHAT, None, "Plain.")


def test_rows_of_from_and_value_are_the_same_chats(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"conversations": [SHARED]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"conversations": SHARED}))
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": CHAT, "conversations": []}))
    for found in DocumentReader(tmp_path, tokenizer=tokenizer):
        assert (found.text, found.messages) == (ANSWERED, CHAT)
    for bad in ({"from": "human"}, {"from": ["human"], "value": "Once."}, {"from": None}):
        rows = {"conversations": [{"from": "narrator", "value": "Once."}, bad]}
        (tmp_path / "d.json").write_text(json.dumps(rows))
        with pytest.raises(InputError, match=r"d\.json.*number 1 is .*expected a record with role"):
            list(DocumentReader(tmp_path / "d.json", tokenizer=tokenizer))


def test_a_column_that_is_named_may_hold_chats(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversation": CHAT}))
    reader = DocumentReader(tmp_path, Columns(text="conversation"), tokenizer=tokenizer)
    (found,) = reader
    assert (found.text, found.messages) == (ANSWERED, CHAT)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": "Why?"}, r"a\.jsonl:1: 'Why\?', expected a list"),
        ({"messages": [{"role": "tool", "content": "4"}]}, r"a\.jsonl:1: the chat template of"),
    ],
)
def test_a_row_that_is_no_chat_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, str], said: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    reader = DocumentReader(tmp_path, tokenizer=tokenizer)
    with pytest.raises(InputError, match=said):
        list(reader)


def test_rows_of_messages_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT}))
    for build in (build_corpus, estimate_build):
        with pytest.raises(InputError, match=r"has no text but messages.*--tokenizer MODEL"):
            build(tmp_path, tmp_path / "out", vocab_size=300)
    assert not (tmp_path / "out").exists()


def test_a_document_is_known_by_what_was_asked_last() -> None:
    again = [*CHAT, {"role": "user", "content": "And then?"}]
    assert Document("a", "text", messages=again).opening == "And then?"
    assert Document("a", "text", messages=CHAT[1:]).opening == "text"
