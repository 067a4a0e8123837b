from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import prismlm
from prismlm.cli.output import say
from prismlm.cli.trace import shares_of
from prismlm.explain.attribution import Share, Sources
from prismlm.explain.subject import worth_showing
from tests.helpers import forked
from tests.helpers.lens_files import change_meta
from tests.helpers.token_corpus import excerpt

TEXT = "The proof relies on the theory of groups."


EXPLAIN = ("--generate", 4, "--by", "domain")


@pytest.fixture(scope="module")
def printed(document, tiny_model):
    return document("explain", tiny_model, TEXT, *EXPLAIN)


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def test_json_is_the_trace(printed, tiny_model):
    trace = prismlm.load(tiny_model).explain(TEXT, generate=4)
    expected = json.loads(json.dumps(trace.to_dict(by="domain", documents=5)))
    assert printed == expected


@pytest.mark.parametrize(
    ("trained", "split", "said"),
    [
        (True, "heldout", "no, held out"),
        (None, "train", "not known"),
    ],
)
def test_held_out_text_is_not_called_trained_on(prism, copy, trained, split, said):
    change_meta(copy / "lens" / "sample", trained_on=trained, split=split)
    page = copy.parent / "report.html"
    shown = " ".join(prism("explain", copy, TEXT, "--html", page).stdout.split())
    assert f"model trained on them: {said}. " in shown
    fact = f'["trained on it","{said}"]'
    assert (fact in page.read_text(encoding="utf-8")) == (trained is not None)
    inspected = " ".join(prism("inspect", copy).stdout.split())
    assert f"split {split} " in inspected
    assert f"model trained on them {said} convergence" in inspected


def test_tokens_limit_steps_and_shares(document, tiny_model, printed):
    spans = {"last": slice(-1, None), "1:3": slice(1, 3), ":-2": slice(-2)}
    for span, rows in spans.items():
        some = document("explain", tiny_model, TEXT, *EXPLAIN, "--tokens", span)
        assert some["positions"] == printed["positions"][rows]
        assert some["sources"]["items"] != printed["sources"]["items"]


def test_ids_of_documents_that_differ_in_the_middle_are_told_apart(capsys, monkeypatch):
    ids = [f"a_long_name_of_a_data_set/{n:04}_OF_A_SERIES#treatments" for n in range(3)]
    shares = Sources("document", tuple(Share(key, 0.3, 0.01) for key in ids), 0.1)
    for columns in (60, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        say(shares_of(shares))
        shown = capsys.readouterr().out
        # No row is folded: a title, a heading, one row each, and a blank line.
        assert len(shown.splitlines()) == 2 + len(ids) + 1 + 1
        assert all(key in shown for key in ids) or columns < 80


def test_the_answer_comes_first_and_the_table_on_request(prism, tiny_model):
    shown = prism("explain", tiny_model, TEXT, "--passages").stdout
    parts = (TEXT, " support: ", "\nDocuments behind it", "\nWhere it comes")
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert places[0] == 0
    assert "resid" not in shown
    last = prism("explain", tiny_model, TEXT, "--tokens", "last").stdout
    assert "resid" in last
    assert re.search(r"^Prediction \d+ alone: \S+ → \S+$", last, re.MULTILINE)


IN_A_TERMINAL = """
import os, pty, sys, json
master, slave = pty.openpty()
if os.fork() == 0:
    os.close(master)
    os.dup2(slave, 1)
    os.dup2(slave, 2)
    {command}
os.close(slave)
chunks = []
while True:
    try:
        chunk = os.read(master, 65536)
    except OSError:
        break
    if not chunk:
        break
    chunks.append(chunk)
print(json.dumps([chunk.decode("utf-8", "replace") for chunk in chunks]))
"""


# The tiny model would have written all of its answer before a second piece is due.
SLOW = """
    import time, torch
    torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: time.sleep(0.02 * type(module).__name__.endswith("ForCausalLM"))
    )
    """


def in_a_terminal(prism, *arguments, slow=""):
    """Return the pieces that a command writes to a terminal, without escape sequences."""
    code = IN_A_TERMINAL.format(command=f"{slow}{forked.COMMAND}")
    chunks = json.loads(prism(*arguments, code=code).stdout)
    return [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", chunk) for chunk in chunks]


def test_words_come_as_they_are_written(prism, tiny_model):
    tokens = 60
    pieces = in_a_terminal(prism, "explain", tiny_model, TEXT, "--generate", tokens, slow=SLOW)
    answer = prismlm.load(tiny_model).generate(TEXT, tokens=tokens)
    assert "".join(answer.split()) in "".join("".join(pieces).split())
    end = next((n for n, one in enumerate(pieces) if " support: " in one), len(pieces))
    assert sum(bool(re.search(r"\w", one)) for one in pieces[:end]) > 3


def test_characters_of_several_tokens_are_whole(prism, tiny_model):
    shown = prism("explain", tiny_model, "Go to 東京 now.", "--tokens", "0:", columns=100).stdout
    assert "�" not in shown
    assert "Go to 東京 now." in shown
    assert "東 1/" in shown


def test_text_cannot_drive_the_terminal(prism, tiny_model):
    text = "a\x1b[31mb\x07 日本\r\n\tc".encode()
    shown = prism("explain", tiny_model, "--file", "-", stdin=text).stdout
    assert not {"\x1b", "\x07", "\r"} & set(shown)


def test_bad_input_is_refused(refused, tiny_model, tmp_path):
    latin, empty = tmp_path / "latin.txt", tmp_path / "empty.txt"
    latin.write_bytes("déjà".encode("latin-1"))
    empty.touch()
    for arguments, words in (
        ([], ["neither", "--file"]),
        (["--file", latin], [str(latin), "UTF-8", "position 1", "0xe9"]),
        (["--file", empty], [str(empty), "empty"]),
        ([TEXT, "--tokens", "one"], ["--tokens one", "A:B"]),
        ([TEXT, "--tokens", "900:"], ["predictions"]),
        (["word " * 600], ["reads 512"]),
        ([TEXT, "--parts", "2"], ["add --parquet"]),
        (
            [TEXT, "--parts", "2", "--parquet", tmp_path / "t.parquet", "--by", "source", "--json"],
            ["leave out --by and --json"],
        ),
    ):
        message = refused("explain", tiny_model, *arguments)
        assert all(word in message for word in words), message
    assert str(tmp_path / "none") in refused("explain", tmp_path / "none", TEXT)
    assert "prismlm.json" in refused("explain", tmp_path, TEXT)


def test_lenses_that_are_several_missing_or_stale(prism, document, refused, copy):
    lens, other = copy / "lens" / "sample", copy / "lens" / "other"
    shutil.copytree(lens, other)
    message = refused("explain", copy, TEXT)
    assert "other, sample" in message
    assert "--lens" in message
    assert document("explain", copy, TEXT, "--lens", "other")["lens"] == str(other)
    shutil.rmtree(other)
    head = copy / "prototype_head.safetensors"
    tensors = load_file(str(head))
    tensors["prototypes"][0, 0] += 0.5
    save_file(tensors, str(head))
    message = refused("explain", copy, TEXT)
    assert all(words in message for words in (str(lens), "prismlm index", "--overwrite"))
    shutil.rmtree(lens.parent)
    for arguments in (("--by", "source"), ("--against", 1)):
        assert "prismlm index" in refused("explain", copy, TEXT, *arguments)
    assert "prismlm index" in prism("explain", copy, TEXT).stdout


def test_passages_against(prism, document, refused, tiny_model, tmp_path):
    page = tmp_path / "page.html"
    command = ("explain", tiny_model, TEXT, "--against", 3)
    expected = prismlm.load(tiny_model).explain(TEXT).against(3)
    rows = json.loads(json.dumps([passage.to_dict() for passage in expected]))
    assert document(*command)["against"] == rows
    shown = prism(*command, "--passages", "--html", page).stdout
    section = shown[shown.index("\nAgainst") :]
    assert shown.index("\nDocuments behind it") < shown.index("\nAgainst")
    assert "another token came next" in section
    for passage in expected:
        assert (passage.title or passage.doc_id)[:20] in section
    assert '"against":[' in page.read_text(encoding="utf-8")
    assert "Against" not in prism("explain", tiny_model, TEXT).stdout


def test_missing_support_is_reported_first(prism, tiny_model):
    shown = prism("explain", tiny_model, TEXT).stdout
    sentence = shown.split("\n\n")[1]
    assert sentence.startswith(
        "No support: no document of this corpus holds what the answer tells."
    )
    assert "--passages" in shown
    evidence = ("Documents behind it", "Where it comes from")
    assert not any(part in shown for part in evidence)
    shown = prism("explain", tiny_model, TEXT, "--passages").stdout
    assert all(part in shown for part in (sentence, *evidence))


def test_documents_that_carry_far_less_are_printed_on_request(prism, tiny_model):
    lm = prismlm.load(tiny_model)
    text = excerpt(lm.lens.corpus, int(lm.lens.corpus.starts[3]), 20)
    trace = lm.explain(text)
    few = worth_showing(trace.documents(50), 5)
    passages = worth_showing(trace.passages(1000), 5, fill=True)
    assert len(few) < 5 == len(passages)
    for options, documents in (((), few), (("--passages",), passages)):
        shown = prism("explain", tiny_model, text, *options).stdout
        found = shown[shown.index("Documents behind it") :].split("\n\n")[0]
        expected = len({one.doc_id for one in documents})
        assert len(re.findall(r"^ *<?\d+%  ", found, re.M)) == expected
        note = "Others carry less or name less of the question: --passages"
        assert (note in shown) == (not options)


def test_passages_of_a_corpus_that_moved_come_from_the_lens(
    prism, refused, copy, tiny_corpus, small_corpus
):
    command = ("explain", copy, TEXT)
    value = prism(*command, "--json", "--against", 2).stdout
    change_meta(copy / "lens" / "sample", corpus_path="/gone")
    assert prism(*command, "--json", "--against", 2).stdout == value
    note = "are decoded from the lens's own tokens"
    assert note in " ".join(prism(*command).stdout.split())
    assert "own tokens" not in prism(*command, "--corpus", tiny_corpus).stdout
    assert "is not the corpus" in refused(*command, "--corpus", small_corpus)
