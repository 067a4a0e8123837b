"""Where results go: said before they are computed, never over what is read."""

from pathlib import Path

import pytest

from prismlm.errors import InputError
from prismlm.outputs import check_outputs, output_files, write_csv, write_text
from prismlm.run_state import writing

NOWHERE = Path("/proc")


def test_places_that_can_be_written_to_are_left_as_they_are(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    new = tmp_path / "also" / "new"
    check_outputs(None, page, tmp_path / "new" / "page.html", directory=new, overwrite=True)
    check_outputs(directory=tmp_path, overwrite=True)
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
    with pytest.raises(
        InputError, match=r"/proc cannot be written to \(.+\): give another directory"
    ):
        check_outputs(directory=NOWHERE / "plots")
    with pytest.raises(InputError, match="/proc cannot be written to"):
        check_outputs(NOWHERE / "page.html")


def test_what_exists_is_replaced_only_when_asked(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(InputError, match=r"page\.html exists: .*--overwrite"):
        check_outputs(page)
    with pytest.raises(InputError, match=r"is not empty: .*--overwrite"):
        check_outputs(directory=tmp_path)
    dangling = tmp_path / "dangling.html"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists"):
        check_outputs(dangling)
    (tmp_path / "empty").mkdir()
    check_outputs(tmp_path / "other.html", directory=tmp_path / "empty")


@pytest.mark.parametrize("spelled", ["itself", "link", "hard link", "dots"])
def test_what_is_read_is_never_replaced(tmp_path, spelled):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    other = tmp_path / "other.txt"
    if spelled == "link":
        other.symlink_to(notes)
    elif spelled == "hard link":
        other.hardlink_to(notes)
    else:
        other = notes if spelled == "itself" else tmp_path / "x" / ".." / "notes.txt"
    with pytest.raises(InputError, match="is read by this command: give another name"):
        check_outputs(other, inputs=(None, "no such lens", notes), overwrite=True)
    with pytest.raises(InputError, match="is to be written twice"):
        check_outputs(other, notes, overwrite=True)


def test_nothing_in_a_directory_that_is_read_is_replaced(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(InputError, match=f"config.json belongs to {model}, which this command"):
        check_outputs(tmp_path / "link" / "config.json", inputs=(model,), overwrite=True)
    with pytest.raises(InputError, match="is read by this command: give another directory"):
        check_outputs(directory=tmp_path / "link", inputs=(model,), overwrite=True)
    check_outputs(model / "page.html", directory=model / "plots", inputs=(model,))


def test_a_name_that_is_too_long_is_told_before_the_work(tmp_path):
    with pytest.raises(InputError, match=r"cannot be written to \(File name too long"):
        check_outputs(tmp_path / f"{'x' * 250}.html")
    assert list(tmp_path.iterdir()) == []


def test_several_files_get_their_names_together_or_not_at_all(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "new" / "two.txt"
    one.write_text("old")

    def fail():
        with output_files(one, two) as places:
            for place in places:
                place.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert one.read_text() == "old"
    assert not list((tmp_path / "new").iterdir())
    with output_files(one, two) as places:
        for place in places:
            place.write_text("whole")
    assert (one.read_text(), two.read_text()) == ("whole", "whole")


def test_what_cannot_be_written_is_an_error_of_ours(tmp_path):
    with pytest.raises(InputError, match="is a directory"):
        write_text(tmp_path, "x")
    with pytest.raises(InputError, match="/dev/full is a device"):
        write_text("/dev/full", "x")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file is a file: give the name of a directory"):
        write_text(tmp_path / "file" / "page.html", "x")
    with pytest.raises(InputError, match="/proc cannot be written to"):
        write_text("/proc/page.html", "x")
    with writing(tmp_path / "page.html"), pytest.raises(InputError, match="another process"):
        write_text(tmp_path / "page.html", "x")


def test_a_table_of_rows(tmp_path):
    write_csv(tmp_path / "t.csv", ["a", "b"], [{"a": 1, "b": "x, y"}, {"a": 2}])
    assert (tmp_path / "t.csv").read_text() == 'a,b\n1,"x, y"\n2,\n'
