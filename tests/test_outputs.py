"""Output files: checked before the work, never over an input, and replaced only on request."""

import os
from pathlib import Path

import pytest

from prismlm.errors import InputError
from prismlm.outputs import check_outputs, output_files, write_text
from prismlm.run_state import writing


def test_writable_outputs_are_left_unchanged(tmp_path):
    page, new = tmp_path / "page.html", tmp_path / "also" / "new"
    page.write_text("old")
    check_outputs(None, page, tmp_path / "new" / "page.html", directory=new, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert page.read_text() == "old"


def check_file(path):
    check_outputs(None, path)


def replace_file(path):
    check_outputs(path, overwrite=True)


def check_directory(path):
    check_outputs(directory=path)


def write(path):
    write_text(path, "x")


@pytest.mark.parametrize(
    ("output", "path", "error"),
    [
        (check_file, ".", r"\. is a directory: give the name of a file"),
        (check_file, "file/page.html", "file is a file: give the name of a directory"),
        (check_file, "file", "file exists: .*--overwrite"),
        (check_file, "dangling", "dangling exists: .*--overwrite"),
        (check_file, "/proc/page.html", r"/proc cannot be written to \(.+\): give another"),
        (check_file, f"{'x' * 250}.html", r"cannot be written to \(File name too long"),
        (check_directory, ".", "is not empty: .*--overwrite"),
        (check_directory, "file/plots", "file is a file: give the name of a directory"),
        (replace_file, "pipe", "pipe is a device or a pipe"),
        (replace_file, "/dev/no-such-device", "is a device or a pipe"),
        (write, ".", "is a directory"),
        (write, "pipe", "pipe is a device or a pipe"),
        (write, "locked", "another process"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(output, path, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path.startswith("/") and not Path(path).parent.is_dir():
        pytest.skip(f"needs {Path(path).parent}")
    Path("file").write_text("old")
    Path("dangling").symlink_to("nowhere")
    os.mkfifo("pipe")
    with writing("locked"), pytest.raises(InputError, match=error):
        output(Path(path))
    assert {file.name for file in tmp_path.iterdir()} == {"file", "dangling", "pipe"}
    assert Path("pipe").is_fifo()
    assert Path("file").read_text() == "old"


@pytest.mark.parametrize("kind", ["itself", "link", "dots"])
def test_an_input_is_never_replaced(tmp_path, kind):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    other = tmp_path / "other.txt"
    if kind == "link":
        other.symlink_to(notes)
    else:
        other = notes if kind == "itself" else tmp_path / "x" / ".." / "notes.txt"
    with pytest.raises(InputError, match="is read by this command: give another name"):
        check_outputs(other, inputs=(None, "no such lens", notes), overwrite=True)
    with pytest.raises(InputError, match="is to be written twice"):
        check_outputs(other, notes, overwrite=True)


def test_an_input_directory_is_never_written_into(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(InputError, match="is read by this command: give another directory"):
        check_outputs(directory=tmp_path / "link", inputs=(tmp_path / "model",), overwrite=True)


def test_files_of_an_input_directory_are_never_replaced(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(InputError, match="is read by this command"):
        check_outputs(tmp_path / "link" / "config.json", inputs=(model,), overwrite=True)
    check_outputs(model / "page.html", directory=model / "plots", inputs=(model,))


def test_several_files_are_written_together_or_not_at_all(tmp_path):
    paths = tmp_path / "one.txt", tmp_path / "new" / "two.txt"
    paths[0].write_text("old")

    def write_all(text, error=None):
        with output_files(*paths) as temporary:
            for path in temporary:
                path.write_text(text)
            if error:
                raise error

    with pytest.raises(RuntimeError, match="stop"):
        write_all("half", RuntimeError("stop"))
    assert paths[0].read_text() == "old"
    assert not list((tmp_path / "new").iterdir())
    write_all("whole")
    assert [path.read_text() for path in paths] == ["whole", "whole"]
