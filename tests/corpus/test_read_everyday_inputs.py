"""Inputs that people have: bad rows named at once or left out, chats, encodings, saved datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from prismlm.corpus import Columns, DocumentReader, build_corpus, load_tokenizer, read_documents
from prismlm.errors import InputError
from prismlm.files import json_text
from tests.helpers.records import write_jsonl

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '\n' }}{% endfor %}"
LISTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}"
    "\n{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content + '|' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"lat": 48.5}}}
ASKED = {"role": "user", "content": "Weather in Paris?"}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
TOLD = [{"role": "tool", "content": "18C"}, {"role": "assistant", "content": "It is 18 degrees."}]
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}],
}


@pytest.fixture
def tokenizer(tiny_corpus: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(tiny_corpus / "tokenizer")


def bad_files(directory: Path) -> None:
    """Write one file of each kind of bad row, and a good row beside each."""
    good = '{"text": "good"}\n'
    (directory / "a_cut.jsonl").write_text(good + '{"text": "cut off he')
    (directory / "b_number.jsonl").write_text(good + '{"text": 12345}\n')
    (directory / "c_half.jsonl").write_text(good + '{"text": "ab\\ud83d"}\n')
    write_jsonl(directory / "d_twice.jsonl", [{"id": n % 2, "text": "good"} for n in range(4)])
    (directory / "e_column.jsonl").write_text(good + '{"words": "x"}\n[1]\n')
    (directory / "f_gbk.jsonl").write_bytes(good.encode() + '{"text": "你好"}\n'.encode("gbk"))
    (directory / "g_list.jsonl").write_text(good + '{"text": "a", "title": ["b"]}\n')
    (directory / "h_gbk.txt").write_bytes("你好，世界。".encode("gbk"))
    pq.write_table(pa.table({"text": [b"bytes", b"more"]}), directory / "i_binary.parquet")


LEFT_OUT = {
    "a column is missing": 1,
    "column is not text or a number": 1,
    "id used before": 2,
    "not UTF-8": 2,
    "not a JSON object": 1,
    "not valid JSON": 1,
    "not valid Unicode": 1,
    "text is a binary value": 2,
    "text is a number": 1,
}


def test_all_bad_rows_are_named_at_once_or_left_out_and_counted(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    bad_files(texts)
    given: dict[str, Any] = {"tokenizer": tiny_corpus / "tokenizer"}
    with pytest.raises(InputError) as caught:
        build_corpus(texts, tmp_path / "out", **given)
    message = str(caught.value)
    assert message.startswith("12 rows cannot be used (a column is missing: 1, ")
    for place in ("a_cut.jsonl:2 ", "b_number.jsonl:2: ", "c_half.jsonl:2: ", "d_twice.jsonl:3: "):
        assert place in message
    assert "--skip-bad-rows" in message
    assert not (tmp_path / "out").exists()
    built = build_corpus(texts, tmp_path / "out", skip_bad_rows=True, **given)
    assert built.meta["left_out"] == LEFT_OUT
    assert built.meta["counts"]["skipped"] == 12
    assert len(built.doc_ids) == 8


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (TOOLS, [ASKED, CALLED, *TOLD], '<assistant>|get_weather{"lat": 48.5}<tool>18C|'),
        (TOOLS, [ASKED, CALLED | {"content": None}, *TOLD], '<assistant>|get_weather{"lat": 48.5}'),
        (PLAIN, [PARTS, *TOLD], "<user>Hi you"),
        (LISTS, [PARTS, {"role": "assistant", "content": [{"text": "Yes."}]}], "<user>Hi you"),
    ],
)
def test_tool_calls_null_contents_and_parts_are_read(
    template: str,
    messages: list[dict[str, Any]],
    expected: str,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    tokenizer.chat_template = template
    rows = [{"id": "x", "messages": messages}]
    for path in (write_jsonl(tmp_path / "t.jsonl", rows), tmp_path / "t.json"):
        path.write_text(json_text(rows[0]))
        (found,) = DocumentReader(path, tokenizer=tokenizer)
        assert expected in found.text
        assert found.opening in ("Weather in Paris?", "Hi you")


def test_a_template_that_leaves_tool_calls_out_is_named(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.chat_template = PLAIN
    path = write_jsonl(tmp_path / "t.jsonl", [{"messages": [ASKED, CALLED, *TOLD]}])
    with pytest.raises(InputError, match=r"the chat template of .* leaves 'get_weather' out"):
        list(DocumentReader(path, tokenizer=tokenizer))
    text = {"type": "text", "text": "Hi"}
    for part in ({"type": "image", "url": "x.png"}, "Hi"):
        path = tmp_path / "t.json"
        path.write_text(json_text({"messages": [{"role": "user", "content": [text, part]}]}))
        with pytest.raises(InputError, match="expected parts of text"):
            list(DocumentReader(path, tokenizer=tokenizer))


def test_a_chat_without_an_answer_is_left_out_of_a_corpus_and_counted(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.chat_template = PLAIN
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    said = [
        ("human", "Use it"),
        ("function_call", "{}"),
        ("observation", "42"),
        ("gpt", "It is 42."),
    ]
    chats = [[{"from": who, "value": what} for who, what in said[:n]] for n in (4, 1)]
    rows = [{"id": f"s{n}", "conversations": chat} for n, chat in enumerate(chats)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    built = build_corpus(path, tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert built.doc_ids == ["s0"]
    assert built.meta["left_out"] == {"chat without an answer": 1}
    first, second = DocumentReader(path, tokenizer=tokenizer)
    assert first.text == "<user>Use it\n<assistant>{}\n<tool>42\n<assistant>It is 42.\n"
    assert second.text == "<user>Use it\n"


def test_a_dataset_saved_to_disk_is_read_with_arrow_alone(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    table = pa.table({"id": ["a", "b"], "text": ["one", "two"], "title": pa.nulls(2)})
    for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
        with pa.ipc.new_stream(saved / name, table.schema) as sink:
            sink.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0"}]}))
    (saved / "dataset_info.json").write_text("{}")
    found = list(read_documents(saved))
    assert [(d.doc_id, d.text, d.source) for d in found] == [
        ("a", "one", "saved"),
        ("b", "two", "saved"),
    ]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved"]}')
    with pytest.raises(InputError, match="with the splits saved: name the directory of one"):
        list(read_documents(tmp_path))


def test_odd_but_whole_inputs_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,NA\n2,"multi\nline ""q"", ok"\n3,\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (tmp_path / "c.jsonl").write_bytes(
        b'\xef\xbb\xbf{"id": "[/red]<b>", "text": "\\u001b[31m<script>"}\n\n'
    )
    (tmp_path / "d.jsonl").write_text("")
    reader = DocumentReader(tmp_path)
    assert [document.text for document in reader] == [
        "NA",
        'multi\nline "q", ok',
        "one\r\ntwo\r\n",
        "\x1b[31m<script>",
    ]
    assert reader.left_out == {"no text": 1}
    (tmp_path / "t.tsv").write_text("id\ttext\n1\ta\n")
    with pytest.raises(InputError, match="does not have a supported extension"):
        list(read_documents(tmp_path / "t.tsv"))
    with pytest.raises(InputError, match="No documents"):
        list(read_documents(tmp_path / "d.jsonl"))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_of_two_or_more_documents_one_is_held_out(
    count: int, tiny_corpus: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(count):
        (texts / f"{number}.txt").write_text("The sea was calm today. " * 9)
    given: dict[str, Any] = {"tokenizer": tiny_corpus / "tokenizer", "overwrite": True}
    built = build_corpus(texts, tmp_path / "out", **given)
    assert len(built.split("heldout")) == built.meta["heldout"]["documents"] == (count > 1)
    assert len(built.split("train")) == count - (count > 1)
    assert built.meta["heldout"]["tokens"] == built.lengths[built.split("heldout")].sum()
    none = build_corpus(texts, tmp_path / "out", heldout_fraction=0, **given)
    assert len(none.split("heldout")) == 0
    stated = write_jsonl(tmp_path / "s.jsonl", [{"text": "a", "split": "train"}] * count)
    own = build_corpus(stated, tmp_path / "out", columns=Columns(id=""), **given)
    assert len(own.split("heldout")) == 0
