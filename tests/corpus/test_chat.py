"""Messages as texts, and rows of them as documents of a corpus."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns, Document, load_tokenizer
from prismlm.corpus.chat import as_chat, chat_text
from prismlm.corpus.read import DocumentReader
from prismlm.errors import InputError
from tests.helpers.chats import ANSWER, ANSWERED, ASKED, CHAT, QUESTION, SHARED, TEMPLATE
from tests.helpers.records import write_jsonl

PLAIN = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m['content'] + '\n' }}"
    "{% endfor %}"
)
LISTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}"
    "\n{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content + '|' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"lat": 48.5}}}
WEATHER = {"role": "user", "content": "Weather in Paris?"}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
REPLY = [{"role": "tool", "content": "18C"}, {"role": "assistant", "content": "It is 18 degrees."}]
HI, YOU = {"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}
PARTS = {"role": "user", "content": [HI, YOU]}


@pytest.fixture
def tokenizer(tiny_corpus):
    """The tiny corpus's tokenizer with a chat template."""
    loaded = load_tokenizer(tiny_corpus / "tokenizer")
    loaded.chat_template = TEMPLATE
    return loaded


def test_messages_are_rendered_up_to_an_answer(tokenizer):
    assert chat_text(tokenizer, as_chat(QUESTION)) == ASKED
    text = chat_text(tokenizer, as_chat("Why?", "Be brief."))
    assert text == "<system>\nBe brief.<|endoftext|>\n<user>\nWhy?<|endoftext|>\n<assistant>\n"
    assert chat_text(tokenizer, CHAT) == ANSWERED
    assert chat_text(tokenizer, CHAT, continue_final=True) == ASKED + ANSWER


IMAGE = {"role": "user", "content": [HI, {"type": "image", "url": "x.png"}]}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], r"\[\], expected a list with at least one"),
        ([*CHAT, "Why?"], "number 2 is 'Why\\?', expected a record with role and content"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ([{"role": "tool", "content": "4"}], "refuses the messages .*Tools are not known here"),
        ([CHAT[0] | {"role": "\ud800"}], "half of a surrogate pair"),
        ([CALLED | {"tool_calls": ["x"]}], "number 0 is"),
        ([IMAGE], "number 0 is"),
        ([{"from": "human"}], "number 0 is .*expected a record with role"),
        ([WEATHER, CALLED], "the chat template of .* leaves 'get_weather' out"),
        (as_chat("Why?", "Be brief."), "the chat template of .* leaves 'Be brief.' out"),
    ],
)
def test_bad_messages_are_refused(tokenizer, messages, error, tmp_path):
    if " leaves " in error:
        tokenizer.chat_template = PLAIN
    with pytest.raises(InputError, match=error):
        chat_text(tokenizer, messages)
    if messages:
        path = write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}])
        with pytest.raises(InputError, match=rf"a\.jsonl:1: (.*){error}"):
            list(DocumentReader(path, tokenizer=tokenizer))


def test_without_a_template_chats_are_refused(tiny_corpus, build, estimate, tmp_path):
    with pytest.raises(InputError, match=r"tokenizer has no chat template.*chat_template\.jinja"):
        chat_text(load_tokenizer(tiny_corpus / "tokenizer"), CHAT)
    for make in (build, estimate):
        with pytest.raises(InputError, match=r"has no text but messages.*--tokenizer MODEL"):
            make(rows=[{"messages": CHAT}], tokenizer=None)
    assert not (tmp_path / "out").exists()


def test_rows_of_messages_are_documents(tokenizer, tmp_path):
    # Where others have tool calls, a table has nulls.
    rows = [{**message, "tool_calls": None} for message in CHAT]
    pq.write_table(pa.table({"messages": [rows], "domain": ["medicine"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"conversations": [SHARED]}), tmp_path / "b.parquet")
    rows = [{"id": "c", "messages": CHAT}, {"conversations": SHARED}]
    write_jsonl(tmp_path / "c.jsonl", [*rows, {"text": "Plain.", "messages": CHAT}])
    *chats, plain = DocumentReader(tmp_path, tokenizer=tokenizer)
    assert [(chat.text, chat.messages) for chat in chats] == [(ANSWERED, CHAT)] * 4
    assert (chats[0].domain, chats[0].opening, chats[2].doc_id) == ("medicine", QUESTION, "c")
    assert (plain.text, plain.messages, plain.opening) == ("Plain.", None, "Plain.")
    path = write_jsonl(tmp_path / "d.jsonl", [{"conversation": CHAT}])
    (named,) = DocumentReader(path, Columns(text="conversation"), tokenizer=tokenizer)
    assert (named.text, named.messages) == (ANSWERED, CHAT)
    asked_again = [*CHAT, {"role": "user", "content": "And then?"}]
    assert Document("a", "text", messages=asked_again).opening == "And then?"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TOOLS, [WEATHER, CALLED, *REPLY], '<assistant>|get_weather{"lat": 48.5}<tool>18C|'),
        (TOOLS, [WEATHER, CALLED | {"content": None}], '<assistant>|get_weather{"lat": 48.5}'),
        (PLAIN, [PARTS, *REPLY], "<user>Hi you"),
        (LISTS, [PARTS, {"role": "assistant", "content": [{"text": "Yes."}]}], "<user>Hi you"),
    ],
)
def test_tool_calls_and_text_parts_are_rendered(template, messages, expected, tokenizer, tmp_path):
    tokenizer.chat_template = template
    path = write_jsonl(tmp_path / "t.json", [{"id": "x", "messages": messages}])
    (document,) = DocumentReader(path, tokenizer=tokenizer)
    assert expected in document.text
    assert document.opening in ("Weather in Paris?", "Hi you")


def test_chats_without_an_answer_are_left_out_of_a_corpus_and_counted(tokenizer, build, tmp_path):
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    speakers = ("human", "function_call", "observation", "gpt")
    values = ("Use it", "{}", "42", "It is 42.")
    chat = [{"from": s, "value": v} for s, v in zip(speakers, values, strict=True)]
    rows = [{"id": f"s{n}", "conversations": part} for n, part in enumerate((chat, chat[:1]))]
    built = build(rows=rows, tokenizer=tmp_path / "tokenizer")
    assert built.doc_ids == ["s0"]
    assert built.meta["left_out"] == {"chat without an answer": 1}
    first, second = DocumentReader(tmp_path / "texts.jsonl", tokenizer=tokenizer)
    assert first.text == "<user>Use it\n<assistant>{}\n<tool>42\n<assistant>It is 42.\n"
    assert second.text == "<user>Use it\n"
