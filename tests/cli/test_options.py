"""Options are checked before anything is read, and no output replaces an input."""

import shutil

import pytest
import typer

from prismlm.cli.app import app

MODEL, TEXTS = "no such model", "texts.jsonl"


@pytest.mark.parametrize(
    ("command", "arguments", "option", "name"),
    [
        ("audit", (MODEL, TEXTS), "--jsonl", "rows.jsonl"),
        ("calibrate", (MODEL, "--task", TEXTS), "--out", "controller.safetensors"),
    ],
)
def test_an_output_replaces_nothing_and_has_the_ending_of_what_it_is(
    refused, tmp_path, command, arguments, option, name
):
    there, other = tmp_path / name, tmp_path / "other.txt"
    there.write_text("mine")
    message = refused(command, *arguments, option, there)
    assert f"{there} exists: give another name, or replace it with --overwrite" in message
    message = refused(command, *arguments, option, other)
    assert f"{other}: expected a name that ends with {there.suffix}" in message
    link = tmp_path / f"link{there.suffix}"
    link.symlink_to(there)
    given = [there if argument == TEXTS else argument for argument in arguments]
    for target in (there, link):
        message = refused(command, *given, option, target, "--overwrite")
        assert "is read by this command" in message
    assert there.read_text() == "mine"
    assert not other.exists()


@pytest.mark.parametrize(
    "command",
    [
        ("corpus", "build", "sample", "--out"),
        ("attach", MODEL, "--corpus", "sample", "--out"),
        ("eval", "glue", MODEL, "--out"),
        ("demo", "--quick", "--no-serve", "--out"),
    ],
)
def test_a_directory_is_never_written_over_a_file(refused, tmp_path, command):
    file = tmp_path / "file"
    file.write_text("mine")
    refused(*command, file)
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (("attach", "{model}", "--corpus", "{corpus}", "--out"), "model"),
        (("index", "{model}", "--corpus", "{corpus}", "--overwrite", "--lens"), "corpus"),
        (("eval", "{model}", "--out"), "model"),
    ],
)
def test_a_directory_that_is_read_is_never_replaced(
    refused, tiny_model, tiny_corpus, tmp_path, command, place
):
    places = {"model": tmp_path / "model", "corpus": tmp_path / "corpus"}
    shutil.copytree(tiny_model, places["model"])
    shutil.copytree(tiny_corpus, places["corpus"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused(*(part.format(**places) for part in command), places[place])
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def commands(command=None, name=()):
    command = typer.main.get_command(app) if command is None else command
    for part, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*name, part))
    if not hasattr(command, "commands"):
        yield " ".join(name), command


def out_of_bounds(option):
    """Yield values that are below or above what an option takes, or no numbers."""
    if (least := getattr(option, "min", None)) is not None:
        yield least - 1
    if (most := getattr(option, "max", None)) is not None:
        yield most + 1
    if "float" in str(option.type_descriptor.annotation):
        yield "nan"


def test_a_value_that_is_out_of_bounds_names_its_option(capsys):
    run, count = typer.main.get_command(app), 0
    for name, command in commands():
        for option in command.params:
            for value in out_of_bounds(option):
                with pytest.raises(SystemExit, match="2"):
                    run([*name.split(), option.opts[0], str(value)])
                assert option.opts[0] in capsys.readouterr().err, name
                count += 1
    assert count > 90
