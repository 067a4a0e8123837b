"""Options that several commands share: what they are given is looked at before anything is read."""

import gzip
import os
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from prismlm.cli.app import app
from tests.helpers import forked
from tests.helpers.small_disk import can_mount, on_small_disk

MODEL = "no such model"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["inspect", "channels", MODEL], "--html"),
        (["inspect", "channels", MODEL], "--out"),
        (["inspect", "interventions", MODEL, "--cases", "women", "--channel", "0:0"], "--out"),
        (["explain", MODEL, "text"], "--html"),
        (["explain", MODEL, "text"], "--parquet"),
    ],
)
def test_commands_look_before_they_read(refused, tmp_path, command, option):
    file = tmp_path / "file"
    file.write_text("mine")
    place = file if option == "--out" else tmp_path
    message = refused(*command, option, place)
    assert f"{place} is a " in message
    assert file.read_text() == "mine"


# Every option that names a file or directory, by what becomes of it. Directories that are gone on
# from have rules of their own, which hold what is there already: see below.
FILES_WRITTEN = {
    ("explain", "--html"): ([MODEL, "text"], "page.html"),
    ("explain", "--parquet"): ([MODEL, "text"], "rows.parquet"),
    ("audit", "--parquet"): ([MODEL, "texts.jsonl"], "rows.parquet"),
    ("audit", "--jsonl"): ([MODEL, "texts.jsonl"], "rows.jsonl"),
    ("audit", "--csv"): ([MODEL, "texts.jsonl"], "rows.csv"),
    ("audit", "--html"): ([MODEL, "texts.jsonl"], "page.html"),
    ("compare", "--parquet"): ([MODEL, MODEL], "pairs.parquet"),
    ("eval robustness", "--out"): ([MODEL, "--pairs", "pairs.parquet"], "found.json"),
    ("eval clamping", "--out"): ([MODEL, "--pairs", "pairs.parquet"], "found.json"),
    ("inspect attention", "--out"): ([MODEL, "text"], "maps.png"),
    ("inspect channels", "--html"): ([MODEL], "page.html"),
    ("inspect heads", "--out"): ([MODEL], "heads.csv"),
    ("map", "--html"): ([MODEL], "page.html"),
}
# Figures in JSON, whatever their file is called.
STUDIES = {"eval robustness", "eval clamping"}
CASES = ["--cases", "women", "--channel", "0:0"]
DIRECTORIES_WRITTEN = {
    ("inspect channels", "--out"): [MODEL],
    ("inspect interventions", "--out"): [MODEL, *CASES],
    ("corpus build", "--out"): ["sample"],
    ("attach", "--out"): [MODEL, "--corpus", "sample"],
    ("index", "--lens"): [MODEL, "--corpus", "no corpus"],
    ("eval suite", "--out"): [MODEL],
    ("eval judge", "--out"): [MODEL, "--prompts", "prompts.txt"],
    ("eval glue", "--out"): [MODEL],
    ("eval pairs", "--out"): [],
    ("demo", "--out"): ["--quick", "--no-serve"],
}
READ = {
    "audit": {"files", "--lens", "--corpus"},
    "attach": {"--corpus"},
    "compare": {"--file", "--lens-a", "--lens-b"},
    "corpus build": {"--data-files", "--tokenizer"},
    "corpus info": {"directory"},
    "eval judge": {"--corpus", "--prompts", "--judge"},
    "eval clamping": {"--pairs"},
    "eval robustness": {"--pairs"},
    "eval pairs": {"--data"},
    "eval suite": {"--data"},
    "eval glue": {"--data"},
    "explain": {"--file", "--lens", "--corpus"},
    "explore": {"--lens", "--corpus"},
    "index": {"--corpus", "--data-files"},
    "inspect attention": {"--cases"},
    "inspect channels": {"--corpus"},
    "inspect heads": {"--corpus"},
    "inspect index": {"--lens"},
    "inspect prototypes": {"--lens"},
    "inspect interventions": {"--cases", "--corpus"},
    "inspect spectra": {"--corpus"},
    "inspect themes": {"--lens", "--corpus"},
    "inspect uncertainty-feedback": {"files", "--corpus"},
    "label": {"--lens"},
    "map": {"--lens"},
    "serve": {"--lens", "--corpus"},
    "sources": {"--file", "--audit", "--lens", "--corpus"},
    "steer": {"--file", "--lens", "--corpus"},
}
PATHS = ("DIR", "FILE", "PARQUET")


def commands(command=None, name=()):
    command = typer.main.get_command(app) if command is None else command
    for part, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*name, part))
    if not hasattr(command, "commands"):
        yield " ".join(name), command


def test_every_option_that_names_a_place_is_known():
    found = {
        (name, option.opts[0])
        for name, command in commands()
        for option in command.params
        if any(word in (option.metavar or "") for word in PATHS)
    }
    read = {(name, option) for name, options in READ.items() for option in options}
    assert found == read | FILES_WRITTEN.keys() | DIRECTORIES_WRITTEN.keys()


@pytest.mark.parametrize(("command", "option"), FILES_WRITTEN)
def test_an_output_replaces_nothing_unasked(refused, tmp_path, command, option):
    arguments, name = FILES_WRITTEN[command, option]
    there = tmp_path / name
    there.write_text("mine")
    message = refused(*command.split(), *arguments, option, there)
    assert f"{there} exists: give another name, or replace it with --overwrite" in message
    assert there.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("command", "option"), [one for one in FILES_WRITTEN if one[0] not in STUDIES]
)
def test_an_output_has_the_ending_of_what_it_is(refused, tmp_path, command, option):
    arguments, name = FILES_WRITTEN[command, option]
    other = tmp_path / "other.txt"
    message = refused(*command.split(), *arguments, option, other)
    assert f"{other}: expected a name that ends with {Path(name).suffix}" in message
    assert not other.exists()


@pytest.mark.parametrize("spelled", ["itself", "dots", "link", "linked directory", "hard link"])
@pytest.mark.parametrize(("command", "option"), FILES_WRITTEN)
def test_an_output_never_replaces_what_is_read(refused, tmp_path, command, option, spelled):
    arguments, name = FILES_WRITTEN[command, option]
    model = tmp_path / "model"
    model.mkdir()
    weights = model / f"weights{Path(name).suffix}"
    weights.write_text("mine")
    target = tmp_path / f"other{weights.suffix}"
    if spelled == "link":
        target.symlink_to(weights)
    elif spelled == "linked directory":
        (tmp_path / "linked").symlink_to(model)
        target = tmp_path / "linked" / weights.name
    elif spelled == "hard link":
        # Of a hard link nobody can say that it lies in the model: it is a file that exists.
        target.hardlink_to(weights)
    else:
        target = weights if spelled == "itself" else model / ".." / "model" / weights.name
    given = [model if argument == MODEL else argument for argument in arguments]
    asked = [] if spelled == "hard link" else ["--overwrite"]
    message = refused(*command.split(), *given, option, target, *asked)
    assert ("exists" if spelled == "hard link" else "which this command reads") in message
    assert weights.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["explain", MODEL, "--file"], "--html"),
        (["audit", MODEL], "--jsonl"),
        (["compare", MODEL, MODEL, "--file"], "--parquet"),
        (["inspect", "heads", MODEL, "--corpus"], "--out"),
        (["inspect", "attention", MODEL, "--roles", "--cases"], "--out"),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_a_text_is_never_replaced_by_what_is_said_of_it(refused, tmp_path, command, option, link):
    ending = Path(FILES_WRITTEN[" ".join(command[: 1 + (command[0] == "inspect")]), option][1])
    texts = tmp_path / f"texts{ending.suffix}"
    texts.write_text("mine")
    target = tmp_path / f"link{ending.suffix}" if link else texts
    if link:
        target.symlink_to(texts)
    message = refused(*command, texts, option, target, "--overwrite")
    assert "is read by this command" in message or "--out is a picture of one text" in message
    assert texts.read_text() == "mine"


@pytest.mark.parametrize(("command", "option"), DIRECTORIES_WRITTEN)
def test_a_directory_is_never_written_over_a_file(refused, tmp_path, command, option):
    file = tmp_path / "file"
    file.write_text("mine")
    refused(*command.split(), *DIRECTORIES_WRITTEN[command, option], option, file)
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("option", ["--html", "--parquet"])
@pytest.mark.parametrize("there", ["/dev/null", "/dev/full", "pipe"])
def test_a_device_is_never_replaced(refused, tmp_path, option, there):
    if there == "pipe":
        there = str(tmp_path / "pipe")
        os.mkfifo(there)
    message = refused("explain", MODEL, "text", option, there, "--overwrite")
    assert f"{there} is a device or a pipe: give the name of a file to write" in message
    assert not Path(there).is_file()


@pytest.mark.skipif(not can_mount(), reason="no mount")
@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        (["explain"], "--html", "page.html"),
        (["explain"], "--parquet", "rows.parquet"),
        (["inspect", "attention"], "--out", "maps.png"),
    ],
)
def test_a_full_disk_is_told_and_leaves_nothing(tiny_model, tmp_path, command, option, name):
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    code = on_small_disk(disk, "4k", left) + forked.COMMAND
    arguments = [*command, tiny_model, "A text of a few words.", option, disk / name]
    done = forked.run(*arguments, code=code, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert f"error: {disk / name} could not be written" in done.stderr
    assert "No space left on device" in done.stderr
    assert list(left.iterdir()) == []


@pytest.mark.skipif(not can_mount(), reason="no mount")
@pytest.mark.parametrize("command", ["corpus", "index"])
def test_a_full_disk_is_told_before_the_reading(tiny_model, tiny_corpus, tmp_path, command):
    disk, left, texts = tmp_path / "disk", tmp_path / "left", tmp_path / "texts.txt"
    disk.mkdir()
    texts.write_text("A line of text.\n" * 100_000)
    arguments = {
        "corpus": ["corpus", "build", texts, "--out", disk / "made"],
        "index": ["index", tiny_model, "--corpus", tiny_corpus, "--lens", disk / "made"],
    }[command]
    code = on_small_disk(disk, "64k", left) + forked.COMMAND
    done = forked.run(*arguments, code=code, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "the disk is full" in done.stderr
    assert "MB are free" in done.stderr
    # What was read says how much it was.
    assert "done in" not in done.stderr
    assert list(left.iterdir()) == []


@pytest.mark.skipif(not can_mount(), reason="no mount")
def test_a_disk_that_a_corpus_fills_is_told_and_nothing_is_left(tiny_corpus, tmp_path):
    """Packed text does not say how long it is."""
    disk, left, texts = tmp_path / "disk", tmp_path / "left", tmp_path / "texts.jsonl.gz"
    disk.mkdir()
    texts.write_bytes(gzip.compress(b'{"text": "A line of text."}\n' * 50_000))
    build = ["corpus", "build", texts, "--tokenizer", tiny_corpus / "tokenizer"]
    code = on_small_disk(disk, "64k", left) + forked.COMMAND
    done = forked.run(*build, "--out", disk / "made", code=code, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"error: the corpus {disk / 'made'} could not be written" in done.stderr
    assert "No space left on device" in done.stderr
    assert list(left.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ["explain", MODEL, "--file"],
        ["steer", MODEL, "--prototype", "1", "--strength", "0.5", "--file"],
        ["corpus", "build", "--out", "corpus", "--dry-run"],
    ],
)
def test_text_in_utf16_is_told_as_such(refused, tmp_path, command):
    notes = tmp_path / "notes.txt"
    notes.write_text("Aspirin reduces pain.", encoding="utf-16")
    assert "notes.txt is UTF-16. Convert it first" in refused(*command, notes)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["explain", MODEL, "a", "--temperature", "nan"],
            "--temperature is nan: expected a finite",
        ),
        (
            ["generate", MODEL, "a", "--temperature", "inf"],
            "--temperature is inf: expected a finite",
        ),
        (["steer", MODEL, "a", "--strength", "nan"], "--strength is nan: expected a finite number"),
        (["explain", MODEL, "a", "--top", "-1"], "--top is -1: expected at least 0."),
        (["sources", MODEL, "--doc", "a", "--top", "0"], "--top is 0: expected at least 1."),
        (
            ["audit", MODEL, "a.txt", "--least-share", "2"],
            "--least-share is 2: expected at least 0 and at most 1.",
        ),
        (["compare", MODEL, MODEL, "--by", "document"], "--by is 'document': expected 'source'"),
        (["index", MODEL, "--split", "heldot"], "Did you mean 'heldout'?"),
    ],
)
def test_a_value_that_is_out_of_range_names_its_option(refused, command, message):
    assert message in refused(*command)


@pytest.mark.parametrize("command", [["explain", MODEL], ["audit"], ["corpus", "build", "--out"]])
def test_arguments_that_are_not_utf8_are_told(command):
    # As Python holds the bytes of a Latin-1 terminal.
    argument = b"caf\xe9".decode("utf-8", "surrogateescape")
    done = CliRunner().invoke(app, [*command, argument])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: argument {len(command) + 1}, {argument!r}, is not UTF-8")


@pytest.mark.parametrize(
    ("command", "option", "place"),
    [
        (["corpus", "build", "{corpus}/text-00000.parquet", "--overwrite"], "--out", "corpus"),
        (["attach", "{model}", "--corpus", "{corpus}"], "--out", "model"),
        (["attach", "{model}", "--corpus", "{corpus}"], "--out", "corpus"),
        (["index", "{model}", "--corpus", "{corpus}", "--overwrite"], "--lens", "corpus"),
        (["index", "{model}", "--corpus", "{corpus}", "--overwrite"], "--lens", "model"),
        (["eval", "{model}"], "--out", "model"),
        (["eval", "glue", "{model}"], "--out", "model"),
    ],
)
def test_a_directory_that_is_read_is_never_replaced(
    refused, tiny_model, tiny_corpus, tmp_path, command, option, place
):
    places = {"model": tmp_path / "model", "corpus": tmp_path / "corpus"}
    shutil.copytree(tiny_model, places["model"])
    shutil.copytree(tiny_corpus, places["corpus"])
    link = tmp_path / "link"
    link.symlink_to(places[place])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for spelled in (places[place], link, tmp_path / "model" / ".." / place):
        refused(*(part.format(**places) for part in command), option, spelled)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
