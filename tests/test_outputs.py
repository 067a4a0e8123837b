"""Output files: checked before the work, never over an input, and replaced only on request."""

import os
from functools import partial
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


replace_file = partial(check_outputs, overwrite=True)
write = partial(write_text, text="x")


def check_directory(path):
    check_outputs(directory=path)


@pytest.mark.parametrize(
    ("output", "path", "error"),
    [
        (check_outputs, ".", r"\. is a directory: give the name of a file"),
        (check_outputs, "file/page.html", "file is a file: give the name of a directory"),
        (check_outputs, "file", "file exists: .*--overwrite"),
        (check_outputs, "dangling", "dangling exists: .*--overwrite"),
        (check_outputs, "/proc/page.html", r"/proc cannot be written to \(.+\): give another"),
        (check_outputs, f"{'x' * 250}.html", r"cannot be written to \(File name too long"),
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


def test_inputs_are_never_replaced_or_written_into(tmp_path):
    model, link, other = (tmp_path / name for name in ("model", "link", "other.txt"))
    model.mkdir()
    notes = model / "notes.txt"
    notes.write_text("mine")
    link.symlink_to(model)
    other.symlink_to(notes)
    for same in (notes, other, link / "notes.txt", tmp_path / "x" / ".." / "model" / "notes.txt"):
        for source in (notes, model):
            with pytest.raises(InputError, match="is read by this command: give another name"):
                check_outputs(same, inputs=(None, "no such lens", source), overwrite=True)
        with pytest.raises(InputError, match="is to be written twice"):
            check_outputs(same, None, notes, overwrite=True)
    with pytest.raises(InputError, match="is read by this command: give another directory"):
        check_outputs(directory=link, inputs=(model,), overwrite=True)
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
