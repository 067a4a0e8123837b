"""What several commands share: whether results can be written, said before they are computed."""

from pathlib import Path

import pytest

from prismlm.cli.options import check_outputs
from prismlm.errors import InputError

NOWHERE = Path("/proc")
MODEL = "no such model"


def test_places_that_can_be_written_to_are_left_as_they_are(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    check_outputs(None, page, tmp_path / "new" / "page.html", directory=tmp_path / "also" / "new")
    check_outputs(directory=tmp_path)
    check_outputs(None)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "old"


def test_a_place_of_another_kind_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(InputError, match=f"{tmp_path} is a directory: give the name of a file"):
        check_outputs(None, tmp_path)
    for place in (file, file / "plots"):
        with pytest.raises(InputError, match=f"{file} is a file: give the name of a directory"):
            check_outputs(directory=place)
    with pytest.raises(InputError, match=f"{file} is a file"):
        check_outputs(file / "page.html")


@pytest.mark.skipif(not NOWHERE.is_dir(), reason="needs a directory that nobody can write to")
def test_a_place_that_cannot_be_written_to_is_named():
    with pytest.raises(InputError, match=r"/proc cannot be written to \(.+\): give another place"):
        check_outputs(directory=NOWHERE / "plots")
    with pytest.raises(InputError, match="/proc cannot be written to"):
        check_outputs(NOWHERE / "page.html")


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
