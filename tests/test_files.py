"""Files are whole or not there, and as open to others as any file."""

import errno
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from prismlm.errors import FormatError, InputError, PrismError
from prismlm.files import (
    atomic_directory,
    atomic_file,
    check_room,
    decoded,
    json_text,
    keep_json,
    read_json,
    read_text,
    remove_left_behind,
    share,
    write_json,
)
from prismlm.training.run import write_history


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_that_safetensors_makes_private_are_as_the_umask_says(tmp_path, umask, mask):
    umask(mask)
    path, beside = tmp_path / "table.safetensors", tmp_path / "table.json"
    with atomic_file(path) as temporary:
        save_file({"a": torch.zeros(2)}, str(temporary))
    beside.write_text("{}")
    assert mode(path) == mode(beside) == 0o666 & ~mask
    inner, theirs = tmp_path / "model", tmp_path / "theirs.safetensors"
    inner.mkdir()
    save_file({"a": torch.zeros(2)}, str(inner / "model.safetensors"))
    theirs.touch(0o600)
    theirs.chmod(0o600)
    (inner / "link.safetensors").symlink_to(theirs)
    (inner / "other-name.safetensors").hardlink_to(theirs)
    share(inner)
    assert mode(inner / "model.safetensors") == 0o666 & ~mask
    assert mode(theirs) == 0o600


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_directory_is_there_whole_wherever_its_replacement_is_killed(
    tmp_path, monkeypatch, renamed
):
    target = tmp_path / "corpus"
    target.mkdir()
    (target / "text").write_text("old")
    real, done = os.rename, []

    def rename(one, other):
        if len(done) == renamed:
            os._exit(9)
        done.append(one)
        real(one, other)

    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr("shutil.rmtree", lambda path: os._exit(9))
        with atomic_directory(target) as made:
            (made / "text").write_text("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert target.exists() == (renamed != 1)
    remove_left_behind(target)
    assert (target / "text").read_text() == ("new" if renamed == 2 else "old")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_too_little_room_is_told_with_all_that_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4e6))
    check_room("the corpus", tmp_path, 8e6)
    with pytest.raises(PrismError, match=r"takes about 10\.0 MB, and 4\.0 MB are free"):
        check_room("the corpus", tmp_path, 10e6)


def test_json_has_no_nan_whoever_writes_it(tmp_path):
    row = {"ce": float("nan"), "of": [1.5, float("inf"), (float("-inf"), "NaN")], "ä": None}
    # What a browser, jq and every strict reader take.
    known = {"ce": None, "of": [1.5, None, [None, "NaN"]], "ä": None}
    said = json_text(row)
    assert json.loads(said, parse_constant=pytest.fail) == known
    assert "ä" in said
    assert "ä" not in json_text(row, ensure_ascii=True)
    write_json(tmp_path / "a.json", row)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == known
    write_history(tmp_path, [row])
    assert json.loads((tmp_path / "training.jsonl").read_text(encoding="utf-8")) == known


TEXT = "Käse, tea and 42 words.\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TEXT.encode("utf-16"), "is UTF-16. Convert it first.*iconv -f utf-16 -t"),
        (
            TEXT.encode("utf-16-le"),
            "is UTF-16. Convert it first.*iconv -f utf-16le -t",
        ),
        (
            TEXT.encode("utf-16-be"),
            "is UTF-16. Convert it first.*iconv -f utf-16be -t",
        ),
        (TEXT.encode("utf-32"), "is UTF-32. Convert it first.*iconv -f utf-32 -t"),
        (
            TEXT.encode("latin-1"),
            "is not UTF-8: byte 0xe4 at offset 1. Convert it with iconv",
        ),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a binary file: expected text in UTF-8"),
        (b"\x1f\x8b\x08\x01\x02\x03\x04\x05\x06", "is a binary file"),
        (b"words and\0words", "is a binary file"),
    ],
)
def test_what_is_no_utf8_is_told_as_what_it_is(data, words):
    with pytest.raises(InputError, match=f"^notes.txt {words}") as raised:
        decoded(data, "notes.txt")
    assert ("iconv" in str(raised.value)) == ("iconv" in words)


def test_utf8_is_text_without_its_mark():
    assert decoded(TEXT.encode("utf-8-sig"), "x") == decoded(TEXT.encode(), "x") == TEXT
    assert decoded(b"", "x") == ""
    assert decoded("\x1b[0m日本語\n".encode(), "x") == "\x1b[0m日本語\n"


def test_a_small_file_that_a_full_disk_refuses_is_told_and_the_former_stays(tmp_path, monkeypatch):
    file = tmp_path / "run.json"
    keep_json(file, {"before": 1})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(PrismError, match=r"run.json could not be written .*No space left"):
        keep_json(file, {"now": 2})
    monkeypatch.undo()
    assert json.loads(file.read_text()) == {"before": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000, '{"a": "\xe4"}'])
def test_what_is_no_json_however_deep_or_long(tmp_path, text):
    file = tmp_path / "meta.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"meta\.json is not valid JSON"):
        read_json(file)


def test_a_file_without_end_or_name_is_no_text(tmp_path):
    with pytest.raises(InputError, match="/dev/zero is larger than 128 MiB"):
        read_text("/dev/zero")
    for path in (tmp_path, tmp_path / ("x" * 300), f"{tmp_path}/a\0b", tmp_path / "nothing"):
        with pytest.raises(InputError, match="cannot be read"):
            read_text(path)
