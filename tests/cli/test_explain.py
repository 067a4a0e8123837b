"""prismlm explain: of texts, questions and chats, in JSON and for people."""

import json
import re
import shutil

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import prismlm
from prismlm.cli.output import say
from prismlm.cli.trace import PrintOptions, explain_and_print, shares_of
from prismlm.corpus.chat import as_chat
from prismlm.corpus.encode import encode_text
from prismlm.explain.attribution import Share, Sources
from prismlm.explain.subject import worth_showing
from prismlm.probes.results import as_json
from tests.helpers import forked
from tests.helpers.chats import ANSWER, ASKED, CHAT, QUESTION, chatting
from tests.helpers.lens_files import change_meta
from tests.helpers.records import write_jsonl
from tests.helpers.token_corpus import excerpt

TEXT = "The proof relies on the theory of groups."
SUPPORT = re.compile(r"^(Strong|Weak|No) support: .*\.$", re.MULTILINE)
UNANSWERED = {"chat without an answer": 2}


@pytest.fixture(scope="module")
def chatty(tiny_model, tmp_path_factory):
    return chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def lm(chatty):
    return prismlm.load(chatty)


def test_json_is_the_trace(document, chatty, lm):
    command = ("explain", chatty, TEXT, "--generate", 4, "--by", "domain")
    printed, trace = document(*command), lm.explain(TEXT, generate=4)
    assert printed == as_json(trace.to_dict(by="domain", documents=5))
    for span, rows in {"last": slice(-1, None), "1:3": slice(1, 3), ":-2": slice(-2)}.items():
        some = document(*command, "--tokens", span)
        assert some["positions"] == printed["positions"][rows]
        assert some["sources"]["items"] != printed["sources"]["items"]
    value = document("explain", chatty, QUESTION, "--chat")
    trace = lm.explain(as_chat(QUESTION), generate=50)
    assert value == as_json(trace.to_dict(by="domain", documents=5))
    brief = ("--system", "Be brief.", "--generate", 2)
    value = document("explain", chatty, QUESTION, "--chat", *brief)
    assert len(value["positions"]) == len(lm.explain(as_chat(QUESTION, "Be brief."), generate=2))


@pytest.mark.parametrize(
    ("trained", "split", "said"),
    [(True, "heldout", "no, held out"), (None, "train", "not known")],
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


def test_the_answer_comes_first_and_the_table_on_request(prism, chatty):
    shown = prism("explain", chatty, TEXT, "--passages").stdout
    parts = (TEXT, " support: ", "\nDocuments behind it", "\nWhere it comes")
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert places[0] == 0
    assert "resid" not in shown
    # Without support, that is said first, and no document is shown unless asked for.
    short = prism("explain", chatty, TEXT).stdout
    reason = "No support: no document of this corpus holds what the answer tells."
    assert short.split("\n\n")[1].startswith(reason)
    assert short.split("\n\n")[1] in shown
    assert "--passages" in short
    assert not any(part in short for part in parts[2:])
    last = prism("explain", chatty, TEXT, "--tokens", "last").stdout
    assert "resid" in last
    assert re.search(r"^Prediction \d+ alone: \S+ → \S+$", last, re.MULTILINE)


IN_A_TERMINAL = """
import os, pty, json
child, terminal = pty.fork()
if child == 0:
    {command}
chunks = []
try:
    while chunk := os.read(terminal, 65536):
        chunks.append(chunk.decode("utf-8", "replace"))
except OSError:  # the other end is closed
    print(json.dumps(chunks))
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


def test_words_come_as_they_are_written(prism, chatty, lm):
    tokens = 60
    pieces = in_a_terminal(prism, "explain", chatty, TEXT, "--generate", tokens, slow=SLOW)
    answer = lm.generate(TEXT, tokens=tokens)
    assert "".join(answer.split()) in "".join("".join(pieces).split())
    end = next((n for n, one in enumerate(pieces) if " support: " in one), len(pieces))
    assert sum(bool(re.search(r"\w", one)) for one in pieces[:end]) > 3


def test_characters_of_several_tokens_are_whole(prism, chatty):
    shown = prism("explain", chatty, "Go to 東京 now.", "--tokens", "0:").stdout
    assert "�" not in shown
    assert "Go to 東京 now." in shown
    assert "東 1/" in shown


def test_text_cannot_drive_the_terminal(prism, chatty):
    text = "a\x1b[31mb\x07 日本\r\n\tc".encode()
    shown = prism("explain", chatty, "--file", "-", stdin=text).stdout
    assert not {"\x1b", "\x07", "\r"} & set(shown)


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


def test_passages_against(prism, document, chatty, lm, tmp_path):
    page = tmp_path / "page.html"
    command = ("explain", chatty, TEXT, "--against", 3)
    expected = lm.explain(TEXT).against(3)
    rows = [passage.to_dict() for passage in expected]
    assert document(*command)["against"] == as_json(rows)
    shown = prism(*command, "--passages", "--html", page).stdout
    section = shown[shown.index("\nAgainst") :]
    assert shown.index("\nDocuments behind it") < shown.index("\nAgainst")
    assert "another token came next" in section
    for passage in expected:
        assert (passage.title or passage.doc_id)[:20] in section
    assert '"against":[' in page.read_text(encoding="utf-8")
    assert "Against" not in prism("explain", chatty, TEXT).stdout


def test_documents_that_carry_far_less_are_printed_on_request(prism, chatty, lm):
    text = excerpt(lm.lens.corpus, int(lm.lens.corpus.starts[3]), 20)
    trace = lm.explain(text)
    few = worth_showing(trace.documents(50), 5)
    passages = worth_showing(trace.passages(1000), 5, fill=True)
    assert len(few) < 5 == len(passages)
    for options, documents in (((), few), (("--passages",), passages)):
        shown = prism("explain", chatty, text, *options).stdout
        found = shown[shown.index("Documents behind it") :].split("\n\n")[0]
        expected = len({one.doc_id for one in documents})
        assert len(re.findall(r"^ *<?\d+%  ", found, re.M)) == expected
        flat = re.sub(r"[][\s]", "", found)
        for one in documents:
            assert re.sub(r"[][\s]", "", one.around.token + one.around.after[:20]) in flat
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


# -- chats


def write_chats(path, *chats, **columns):
    rows = [{"id": f"{n}", "messages": messages} | columns for n, messages in enumerate(chats)]
    return write_jsonl(path, rows)


@pytest.fixture
def printed(prism):
    """Run explain, and return what it prints, which has no undefined figures."""

    def run(*arguments):
        shown = prism("explain", *arguments).stdout
        assert not re.search(r"\b(nan|None|inf)\b|�", shown), shown
        return shown

    return run


def test_a_steered_answer_is_shown_without_its_prompt(prism, document, chatty):
    how = ("steer", chatty, QUESTION, "--chat", "--prototype", 7, "--edit", "ablate")
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


def test_only_the_answer_is_generated(prism, chatty, lm):
    shown = prism("generate", chatty, QUESTION, "--chat", "--tokens", 6).stdout
    assert shown.rstrip("\n") == lm.generate(ASKED, tokens=6)[len(ASKED) :].rstrip("\n")


def test_files_of_chats_are_explained_and_audited_by_their_answers(document, chatty, lm, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", CHAT, domain="medicine")
    trace = lm.explain(CHAT)
    assert document("explain", chatty, "--file", chats)["summary"] == trace.summary
    rows = tmp_path / "rows.parquet"
    alone = document("audit", chatty, chats, "--parquet", rows, "--overwrite")
    (row,) = pq.read_table(rows).to_pylist()
    assert (row["text_id"], row["opening"]) == ("0", QUESTION)
    assert row["predictions"] == alone["predictions"] == len(trace) - trace.first - 1
    doc = row["documents"][0]["doc_id"]
    value = document("sources", chatty, "--doc", doc, "--file", chats)
    assert value["texts"][0]["opening"] == QUESTION
    # Chats that end with a question are left out.
    asked_again = [*CHAT, {"role": "user", "content": QUESTION}]
    unanswered = write_chats(tmp_path / "unanswered.jsonl", CHAT[:-1], CHAT, asked_again)
    value = document("audit", chatty, unanswered)
    assert (value["left_out"], value["texts"]) == (UNANSWERED, 1)
    compared = document("compare", chatty, chatty, "--file", unanswered)["texts"]
    assert compared["left_out"] == UNANSWERED
    assert value["predictions"] == compared["predictions"] == alone["predictions"]


def test_a_question_in_another_language(printed, chatty):
    question = "ماذا يفعل الدواء؟"
    shown = printed(chatty, question)
    assert shown.startswith(f"{question} → ")
    assert len(SUPPORT.findall(shown)) == 1
    # So small a model may end its text at once.
    shown = printed(chatty, question, "--chat")
    assert shown.startswith(f"{question}\n\n")
    assert SUPPORT.search(shown) or "The model wrote nothing" in shown


@pytest.mark.parametrize("blanks", ["", "\n\n"])
def test_an_empty_answer(blanks, lm, capsys, monkeypatch):
    end = torch.tensor([[*encode_text(lm.tokenizer, blanks), lm.tokenizer.eos_token_id]])
    monkeypatch.setattr(lm.model, "generate", lambda inputs, **_: torch.cat([inputs, end], 1))
    trace = explain_and_print(lm, as_chat(QUESTION), PrintOptions("domain"), generate=5)
    assert (trace.written, trace.answer) == (end.shape[1], blanks)
    shown = capsys.readouterr().out
    wrote = "nothing but blanks." if blanks else "nothing: it ended the text at once."
    assert shown.startswith(f"{QUESTION}\n\nThe model wrote {wrote}\n")
    assert not SUPPORT.search(shown)
    assert "Documents behind it" not in shown


def test_an_answer_that_repeats_the_question(printed, chatty, tmp_path):
    for answer in (QUESTION, f"{QUESTION} {ANSWER[:20]}", ANSWER):
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        shown = printed(chatty, "--file", write_chats(tmp_path / "chats.jsonl", turns))
        assert shown.startswith(f"{QUESTION}\n\n{answer}\n")
        assert ("The answer repeats the question" in shown) == (answer != ANSWER)


def test_a_chat_that_ends_with_the_user_is_answered(printed, document, chatty, lm, tmp_path):
    turns = [
        {"role": "user", "content": "Is it a drug?"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": QUESTION},
    ]
    chats = write_chats(tmp_path / "chats.jsonl", turns)
    answer = lm.explain(turns, generate=50).answer.split()
    begin = f"{QUESTION}\n\n{answer[0] if answer else 'The model wrote nothing'}"
    assert printed(chatty, "--file", chats).startswith(begin)
    value = document("explain", chatty, "--file", chats)
    assert value["positions"][-1]["target_from"] == "generated"
    shown = printed(chatty, "--file", chats, "--generate", 0)
    assert QUESTION in shown
    assert SUPPORT.search(shown)


def test_a_lens_without_a_support_scale_says_how_to_get_one(printed, copy):
    change_meta(copy / "lens" / "sample", support=None)
    shown = " ".join(printed(copy, "The patient was given a dose of the drug").split())
    assert "this lens has no support scale." in shown
    assert "prismlm index MODEL --corpus DIR --positions 1 --overwrite" in shown
    assert "Documents behind it" in shown
    assert not SUPPORT.search(shown)
