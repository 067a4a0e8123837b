"""Options that several commands share: what they are given is looked at before anything is read."""

import pytest

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


@pytest.mark.parametrize(
    ("command", "outputs"),
    [
        (["explain", MODEL, "--file"], ["--html", "--parquet"]),
        (["audit", MODEL], ["--jsonl", "--html"]),
        (["compare", MODEL, MODEL, "--file"], ["--parquet"]),
        (["inspect", "heads", MODEL, "--corpus"], ["--out"]),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_an_output_never_replaces_an_input(refused, tmp_path, command, outputs, link):
    endings = {"--html": "html", "--parquet": "parquet", "--jsonl": "jsonl", "--out": "csv"}
    for option in outputs:
        texts = tmp_path / f"texts.{endings[option]}"
        texts.write_text("mine")
        target = tmp_path / f"link.{endings[option]}" if link else texts
        if link:
            target.symlink_to(texts)
        message = refused(*command, texts, option, target, "--overwrite")
        assert "is read by this command" in message
        assert texts.read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        (["explain", MODEL, "text"], "--html", "page.html"),
        (["audit", MODEL, "texts.jsonl"], "--csv", "rows.csv"),
        (["compare", MODEL, MODEL], "--parquet", "pairs.parquet"),
        (["inspect", "attention", MODEL, "text"], "--out", "maps.png"),
        (["inspect", "heads", MODEL], "--out", "heads.csv"),
        (["inspect", "channels", MODEL], "--html", "page.html"),
    ],
)
def test_an_output_replaces_nothing_unasked(refused, tmp_path, command, option, name):
    there = tmp_path / name
    there.write_text("mine")
    message = refused(*command, option, there)
    assert f"{there} exists: give another name, or replace it with --overwrite" in message
    assert there.read_text() == "mine"
