"""Options are checked before anything is read, and no output replaces an input."""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from prismlm.cli.app import app
from prismlm.cli.options import open_model

MODEL, TEXTS = "no such model", "texts.jsonl"
# Every option that names a file to write.
FILES_WRITTEN = {
    ("explain", "--html"): ([MODEL, "--file", TEXTS], "page.html"),
    ("explain", "--parquet"): ([MODEL, "--file", TEXTS], "rows.parquet"),
    ("audit", "--parquet"): ([MODEL, TEXTS], "rows.parquet"),
    ("audit", "--jsonl"): ([MODEL, TEXTS], "rows.jsonl"),
    ("audit", "--csv"): ([MODEL, TEXTS], "rows.csv"),
    ("audit", "--html"): ([MODEL, TEXTS], "page.html"),
    ("eval robustness", "--out"): ([MODEL, "--pairs", "pairs.parquet"], "found.json"),
    ("eval clamping", "--out"): ([MODEL, "--pairs", "pairs.parquet"], "found.json"),
    ("inspect attention", "--out"): ([MODEL, "text"], "maps.png"),
    ("inspect channels", "--html"): ([MODEL], "page.html"),
    ("map", "--html"): ([MODEL], "page.html"),
    ("calibrate", "--out"): ([MODEL, "--task", TEXTS], "controller.safetensors"),
    ("suppress", "--out"): ([MODEL, "--examples", TEXTS], "controller.safetensors"),
}
DIRECTORIES_WRITTEN = {
    ("corpus build", "--out"): ["sample"],
    ("attach", "--out"): [MODEL, "--corpus", "sample"],
    ("index", "--lens"): [MODEL, "--corpus", "no corpus"],
    ("eval suite", "--out"): [MODEL],
    ("eval judge", "--out"): [MODEL, "--prompts", "prompts.txt"],
    ("eval glue", "--out"): [MODEL],
    ("eval pairs", "--out"): [],
    ("demo", "--out"): ["--quick", "--no-serve"],
}
# All other options that name places are read.
READ = {
    "--lens", "--lens-a", "--lens-b", "--corpus", "--file", "--pairs", "--data", "--cases",
    "--data-files", "--tokenizer", "--judge", "--prompts", "files", "directory",
    "--controller", "--task", "--test", "--examples", "--keep",
}  # fmt: skip


def commands(command=None, name=()):
    command = typer.main.get_command(app) if command is None else command
    for part, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*name, part))
    if not hasattr(command, "commands"):
        yield " ".join(name), command


def test_every_option_that_names_a_place_is_known():
    places = {
        (name, option.opts[0])
        for name, command in commands()
        for option in command.params
        if any(word in (option.metavar or "") for word in ("DIR", "FILE", "PARQUET"))
    }
    written = FILES_WRITTEN.keys() | DIRECTORIES_WRITTEN.keys()
    assert written <= places
    # What export writes is an argument, and has a test of its own.
    assert {option for _, option in places - written - {("export", "out")}} == READ


@pytest.mark.parametrize(("command", "option"), FILES_WRITTEN)
def test_an_output_replaces_nothing_and_has_the_ending_of_what_it_is(
    refused, tmp_path, command, option
):
    arguments, name = FILES_WRITTEN[command, option]
    there, other, model = tmp_path / name, tmp_path / "other.txt", tmp_path / "model"
    there.write_text("mine")
    message = refused(*command.split(), *arguments, option, there)
    assert f"{there} exists: give another name, or replace it with --overwrite" in message
    # Studies write figures in JSON, whatever their file is called.
    if "eval" not in command:
        message = refused(*command.split(), *arguments, option, other)
        assert f"{other}: expected a name that ends with {there.suffix}" in message
    model.mkdir()
    weights, link = model / name, tmp_path / f"link{there.suffix}"
    weights.write_text("mine")
    link.symlink_to(weights)
    given = [model if argument == MODEL else argument for argument in arguments]
    for target in (weights, link):
        message = refused(*command.split(), *given, option, target, "--overwrite")
        assert "which this command reads" in message
    if TEXTS in arguments:
        given = [there if argument == TEXTS else argument for argument in arguments]
        message = refused(*command.split(), *given, option, there, "--overwrite")
        assert "is read by this command" in message
    assert weights.read_text() == there.read_text() == "mine"
    assert not other.exists()


@pytest.mark.parametrize(("command", "option"), DIRECTORIES_WRITTEN)
def test_a_directory_is_never_written_over_a_file(refused, tmp_path, command, option):
    file = tmp_path / "file"
    file.write_text("mine")
    refused(*command.split(), *DIRECTORIES_WRITTEN[command, option], option, file)
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def out_of_bounds(option):
    """Yield values that are below or above what an option takes, or no numbers."""
    if (least := getattr(option, "min", None)) is not None:
        yield least - 1
    if (most := getattr(option, "max", None)) is not None:
        yield most + 1
    if "float" in str(option.type_descriptor.annotation):
        yield from ("nan", "inf")


def test_a_value_that_is_out_of_bounds_names_its_option(capsys):
    run, count = typer.main.get_command(app), 0
    for name, command in commands():
        for option in command.params:
            for value in out_of_bounds(option):
                with pytest.raises(SystemExit, match="2"):
                    run([*name.split(), option.opts[0], str(value)])
                assert option.opts[0] in capsys.readouterr().err, name
                count += 1
    assert count > 100


def test_arguments_that_are_not_utf8_are_refused():
    # As Python holds the bytes of a Latin-1 terminal.
    argument = b"caf\xe9".decode("utf-8", "surrogateescape")
    done = CliRunner().invoke(app, ["corpus", "build", "--out", argument])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: argument 4, {argument!r}, is not UTF-8")


def test_a_model_is_fetched_before_the_spinner_turns(monkeypatch, tiny_model):
    seen = []

    @contextmanager
    def spinner(_):
        seen.append("turns")
        yield

    def fetch(model, revision=None):
        seen.append(str(model))
        return tiny_model

    # The hub draws bars, which a spinner would tear.
    monkeypatch.setattr("prismlm.cli.options.spinner", spinner)
    monkeypatch.setattr("prismlm.hub.model_directory", fetch)
    assert open_model(Path("org/name")).path == tiny_model
    assert seen[:2] == ["org/name", "turns"]
    assert "org/name" not in seen[1:]


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
    for spelled in (places[place], link):
        refused(*(part.format(**places) for part in command), option, spelled)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
