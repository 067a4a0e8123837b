from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from safetensors.torch import load_file, save_file

import prismlm
from prismlm.cli.trace import passage_text
from prismlm.explain.attribution import worth_showing
from prismlm.lens.text import Around
from tests.helpers import forked
from tests.helpers.html_reader import Reader
from tests.helpers.lens_meta import change_meta

TEXT = "The proof relies on the theory of groups."
POSITION = {
    "position", "token", "token_id", "target", "target_id", "target_from", "logit", "model_logit",
    "probability", "bias", "residual", "residual_evidence", "bias_evidence", "explained_share",
    "prototypes", "uncertainty",
}  # fmt: skip
PROTOTYPE = {"id", "activation", "cosine", "contribution", "evidence", "name", "category"}


@pytest.fixture(scope="module")
def printed(prism, tiny_model):
    result = prism("explain", tiny_model, TEXT, "--generate", 4, "--by", "domain", "--json")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def test_json_is_the_trace(printed, tiny_model):
    trace = prismlm.load(tiny_model).explain(TEXT, generate=4)
    expected = json.loads(json.dumps(trace.to_dict(by="domain", documents=5)))
    assert printed == expected


@pytest.mark.parametrize(
    ("trained", "split", "said", "above"),
    [
        (True, "train", "yes", None),
        (True, "heldout", "no, held out", "were held out when the model was trained"),
        (True, "all", "yes, except held-out documents", None),
        (False, "heldout", "no", "was not trained on this corpus"),
        (None, "train", "not known", None),
    ],
)
def test_what_was_held_out_is_not_called_trained_on(copy, prism, trained, split, said, above):
    change_meta(copy / "lens" / "sample", trained_on=trained, split=split)
    page = copy.parent / "report.html"
    shown = " ".join(prism("explain", copy, TEXT, "--html", page).stdout.split())
    assert ("was trained" in shown or "trained on this" in shown) == (above is not None)
    assert above is None or above in shown
    fact = f'["trained on it","{said}"]'
    assert (fact in page.read_text(encoding="utf-8")) == (trained is not None)
    inspected = " ".join(prism("inspect", copy).stdout.split())
    assert f"model trained on them {said} convergence" in inspected
    assert json.loads(prism("inspect", copy, "--json").stdout)["split"] == split


def test_json_fields(printed):
    assert set(printed) == {
        *("model", "lens", "positions", "sources", "documents"),
        *("summary", "support", "passages", "verbatim"),
    }
    assert all(set(step) == POSITION for step in printed["positions"])
    uses = [use for step in printed["positions"] for use in step["prototypes"]]
    assert uses
    assert all(set(use) == PROTOTYPE for use in uses)
    assert set(printed["sources"]) == {"by", "items", "unattributed"}
    assert printed["sources"]["by"] == "domain"
    assert len(printed["documents"]) == 5
    fields = {"doc_id", "share", "source", "license", "text", "position"}
    fields |= {"domain", "title", "url", "token", "also", "cosine", "for_or_against"}
    places = printed["documents"] + printed["passages"]
    assert all(set(place) == fields for place in places)
    items = printed["sources"]["items"]
    assert all(item["lift"] == item["share"] / item["base_rate"] for item in items)
    assert printed["support"]["level"] in ("strong", "weak", "none")
    assert len(printed["support"]["tokens"]) == 4
    kinds = [step["target_from"] for step in printed["positions"]]
    assert kinds == ["text"] * (len(kinds) - 4) + ["generated"] * 4


def test_tokens_limit_steps_and_shares(prism, tiny_model, printed):
    result = prism("explain", tiny_model, TEXT, "--generate", 4, "--tokens", "last", "--json")
    last = json.loads(result.stdout)
    assert last["positions"] == printed["positions"][-1:]
    assert last["sources"]["items"] != printed["sources"]["items"]


@pytest.mark.parametrize("columns", [80, 120])
def test_human_output_fits(prism, tiny_model, columns):
    result = prism("explain", tiny_model, TEXT * 3, "--tokens", "all", columns=columns)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert max(cell_len(line.rstrip()) for line in lines) <= columns
    assert "\x1b" not in result.stdout
    head = next(n for n, line in enumerate(lines) if line.startswith("no token "))
    rows = lines[head + 1 : lines.index("", head)]
    # One prediction a line: none wraps.
    assert [int(row.split()[0]) for row in rows] == list(range(len(rows)))
    assert "no proof" in " ".join(lines[-4:])


def test_the_answer_comes_first_and_the_table_only_if_asked_for(prism, tiny_model):
    shown = prism("explain", tiny_model, TEXT, "--passages").stdout
    parts = (TEXT, " support: ", "\nDocuments behind it", "\nWhere it comes")
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert places[0] == 0
    # A sentence has one figure, and a document its title.
    trace = prismlm.load(tiny_model).explain(TEXT)
    assert all(len(re.findall(r"\d+%", one)) < 2 for one in trace.summary.split(". "))
    assert all(one.title for one in trace.documents(5))
    assert not any(one.doc_id in shown for one in trace.documents(5))
    assert "resid" not in shown
    assert "resid" in prism("explain", tiny_model, TEXT, "--tokens", "last").stdout


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


@pytest.mark.parametrize("command", [("generate", "--tokens"), ("explain", "--generate")])
def test_words_come_as_they_are_written(prism, tiny_model, command):
    arguments = (command[0], tiny_model, TEXT, command[1], 120)
    code = IN_A_TERMINAL.format(command=f"{SLOW}    {forked.COMMAND}")
    chunks = json.loads(prism(*arguments, code=code).stdout)
    plain = [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", chunk) for chunk in chunks]
    whole = " ".join("".join(plain).split())
    answer = " ".join(prismlm.load(tiny_model).generate(TEXT, tokens=120).split())
    assert "".join(answer.split()) in "".join(whole.split())
    end = next((n for n, one in enumerate(plain) if " support: " in one), len(plain))
    assert sum(bool(re.search(r"\w", one)) for one in plain[:end]) > 3


def test_an_error_after_the_prompt_has_its_own_line(prism, tiny_model):
    code = IN_A_TERMINAL.format(command=forked.COMMAND)
    chunks = json.loads(prism("generate", tiny_model, TEXT, "--tokens", 600, code=code).stdout)
    assert f"{TEXT}\r\nerror: " in "".join(chunks)


def test_characters_of_several_tokens_are_whole(prism, tiny_model):
    result = prism("explain", tiny_model, "Go to 東京 now.", "--tokens", "0:", columns=100)
    assert result.returncode == 0, result.stderr
    assert "�" not in result.stdout
    assert "Go to 東京 now." in result.stdout
    assert "東 1/" in result.stdout


def test_text_cannot_drive_the_terminal(prism, tiny_model):
    result = prism(
        "explain", tiny_model, "--file", "-", stdin="a\x1b[31mb\x07 日本\r\n\tc".encode()
    )
    assert result.returncode == 0, result.stderr
    assert not {"\x1b", "\x07", "\r"} & set(result.stdout)


def test_files_written_beside(prism, tiny_model, tmp_path):
    page, table = tmp_path / "page.html", tmp_path / "t.parquet"
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    outputs = ["--html", page, "--parquet", table, "--json"]
    result = prism("explain", tiny_model, "--file", text, *outputs)
    assert result.returncode == 0, result.stderr
    positions = json.loads(result.stdout)["positions"]
    assert pq.read_table(table).num_rows == sum(len(step["prototypes"]) for step in positions)
    (block,) = Reader(page.read_text(encoding="utf-8")).blocks
    assert len(block["answers"][0]["steps"]) == len(positions)
    assert result.stderr == f"wrote {page}\nwrote {table}\n"


def test_text_and_file_that_cannot_be_used(refused, tiny_model, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("déjà".encode("latin-1"))
    empty = tmp_path / "empty.txt"
    empty.touch()
    for arguments, words in (
        ([], ["neither", "--file"]),
        (["a text", "--file", latin], ["both", "--file"]),
        (["--file", latin], [str(latin), "UTF-8", "offset 1", "0xe9"]),
        (["--file", empty], [str(empty), "empty"]),
        (["--file", "-"], ["stdin is empty"]),
        ([" ", "--lines"], ["the text is empty"]),
        (["--file", tmp_path / "none.txt"], ["none.txt", "No such file"]),
        ([TEXT, "--by", "domains"], ["'domains'", "'domain'"]),
        ([TEXT, "--tokens", "one"], ["--tokens one", "A:B"]),
    ):
        message = refused("explain", tiny_model, *arguments)
        assert all(word in message for word in words), message


def test_text_the_model_cannot_read(refused, tiny_model):
    assert "empty" in refused("explain", tiny_model, "")
    assert "reads 512" in refused("explain", tiny_model, "word " * 600)
    assert "predictions" in refused("explain", tiny_model, TEXT, "--tokens", "900:")


def test_directories_that_are_no_model(refused, tmp_path):
    assert str(tmp_path / "none") in refused("explain", tmp_path / "none", TEXT)
    assert "prismlm.json" in refused("explain", tmp_path, TEXT)


def test_a_stale_lens_is_refused(refused, copy):
    head = copy / "prototype_head.safetensors"
    tensors = load_file(str(head))
    tensors["prototypes"][0, 0] += 0.5
    save_file(tensors, str(head))
    message = refused("explain", copy, TEXT)
    assert str(copy / "lens" / "sample") in message
    assert "prismlm index" in message
    assert "--overwrite" in message


def test_several_lenses(prism, refused, copy):
    shutil.copytree(copy / "lens" / "sample", copy / "lens" / "other")
    message = refused("explain", copy, TEXT)
    assert "other, sample" in message
    assert "--lens" in message
    result = prism("explain", copy, TEXT, "--lens", "other", "--json")
    assert json.loads(result.stdout)["lens"] == str(copy / "lens" / "other")


def test_without_a_lens(prism, refused, copy):
    shutil.rmtree(copy / "lens")
    assert "prismlm index" in refused("explain", copy, TEXT, "--by", "source")
    assert "prismlm index" in refused("explain", copy, TEXT, "--against", 1)
    result = prism("explain", copy, TEXT)
    assert result.returncode == 0, result.stderr
    assert "prismlm index" in result.stdout


def test_what_speaks_against(prism, refused, tiny_model, tmp_path):
    page = tmp_path / "page.html"
    how = ("explain", tiny_model, TEXT, "--against", 3)
    printed = json.loads(prism(*how, "--json").stdout)["against"]
    expected = prismlm.load(tiny_model).explain(TEXT).against(3)
    assert printed == json.loads(json.dumps([one.to_dict() for one in expected]))
    shown = prism(*how, "--passages", "--html", page).stdout
    section = shown[shown.index("\nAgainst") :]
    assert shown.index("\nDocuments behind it") < shown.index("\nAgainst")
    assert "another token came next" in section
    for one in expected:
        assert (one.title or one.doc_id)[:20] in section
        given = "<1%" if one.probability < 0.005 else f"{one.probability:.0%}"
        assert f"to which the model gave {given} there" in section
    assert '"against":[' in page.read_text(encoding="utf-8")
    assert "Against" not in prism("explain", tiny_model, TEXT).stdout
    assert "'--against'" in refused("explain", tiny_model, TEXT, "--against", -1)


def test_text_that_the_corpus_has_nothing_about_is_told_so_first(prism, copy):
    shown = prism("explain", copy, TEXT).stdout
    said = shown.split("\n\n")[1]
    assert said.startswith("No support: nothing in this corpus is about the answer.")
    assert "--passages" in shown
    assert not any(part in shown for part in ("Documents behind it", "Where it comes from"))
    asked = prism("explain", copy, TEXT, "--passages").stdout
    assert said in asked
    assert all(part in asked for part in ("Documents behind it", "Where it comes from"))


def test_documents_that_carry_far_less_are_printed_if_asked_for(prism, tiny_model):
    lm = prismlm.load(tiny_model)
    text = lm.lens.corpus.excerpt(int(lm.lens.corpus.starts[3]), 20)
    found = lm.explain(text).documents(5)
    assert len(worth_showing(found)) < len(found) == 5

    def documents(*options):
        printed = prism("explain", tiny_model, text, *options).stdout
        return printed, printed[printed.index("Documents behind it") :].split("\n\n")[0]

    printed, shown = documents()
    assert len(re.findall(r"^ *<?\d+%  ", shown, re.M)) == len(worth_showing(found))
    assert "All others carry far less: --passages shows them." in printed
    printed, shown = documents("--passages")
    assert len(re.findall(r"^ *<?\d+%  ", shown, re.M)) == 5
    assert "All others" not in printed


@pytest.mark.parametrize(
    ("around", "also", "shown"),
    [
        (
            Around("They soon went to", " war", " over it."),
            [(10, 17)],
            "They soon [went to war] over it.",
        ),
        (Around("One. ", "Two", " is."), [], "One. [Two] is."),
        (Around("x" * 200 + " A title", "\nThe", " end"), [], "A title ↵ [The] end"),
        (Around("a", "\n", "b"), [], "a[↵]b"),
        (Around("a ", " ", "b c"), [(5, 6)], "a [␣]b [c]"),
    ],
)
def test_what_is_marked_stands_in_brackets(around, also, shown):
    assert passage_text(around, also, 60).plain.strip("…").endswith(shown)


def test_a_corpus_that_is_gone_leaves_passages_to_the_lens(prism, refused, copy, tiny_corpus):
    there = prism("explain", copy, TEXT, "--json", "--against", 2).stdout
    change_meta(copy / "lens" / "sample", corpus_path="/gone")
    assert prism("explain", copy, TEXT, "--json", "--against", 2).stdout == there
    note = "are decoded from the lens's own tokens"
    assert note in " ".join(prism("explain", copy, TEXT).stdout.split())
    told = prism("explain", copy, TEXT, "--corpus", tiny_corpus)
    assert told.returncode == 0
    assert "own tokens" not in told.stdout
    assert "is not a directory" in refused("explain", copy, TEXT, "--corpus", "/nowhere")


def test_another_corpus_is_refused(refused, copy, small_corpus):
    assert "is not the corpus" in refused("explain", copy, TEXT, "--corpus", small_corpus)
