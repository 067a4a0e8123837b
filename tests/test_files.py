"""Files and directories are written whole or not at all; JSON and text are read with care."""

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
from prismlm.training.trainer import write_history


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_safetensors_files_get_the_permissions_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        path, other = tmp_path / "table.safetensors", tmp_path / "table.json"
        with atomic_file(path) as temporary:
            save_file({"a": torch.zeros(2)}, str(temporary))
        other.write_text("{}")
        assert mode(path) == mode(other) == 0o666 & ~mask
        model, private = tmp_path / "model", tmp_path / "private.safetensors"
        model.mkdir()
        save_file({"a": torch.zeros(2)}, str(model / "model.safetensors"))
        private.touch(0o600)
        private.chmod(0o600)
        (model / "link.safetensors").symlink_to(private)
        (model / "other-name.safetensors").hardlink_to(private)
        share(model)
        assert mode(model / "model.safetensors") == 0o666 & ~mask
        assert mode(private) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_directory_is_whole_after_a_kill_between_renames(tmp_path, monkeypatch, renames):
    target = tmp_path / "corpus"
    target.mkdir()
    (target / "text").write_text("old")
    real, done = os.rename, []

    def rename(old, new):
        if len(done) == renames:
            os._exit(9)
        done.append(old)
        real(old, new)

    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "rename", rename)
        monkeypatch.setattr("shutil.rmtree", lambda path: os._exit(9))
        with atomic_directory(target) as temporary:
            (temporary / "text").write_text("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert target.exists() == (renames != 1)
    remove_left_behind(target)
    assert (target / "text").read_text() == ("new" if renames == 2 else "old")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_room_is_asked_for_while_another_process_finishes_parts(tmp_path, monkeypatch):
    part, scandir = tmp_path / "partial" / ".part.0a1b2c3d.tmp", os.scandir
    part.mkdir(parents=True)

    def scan(path):
        if Path(path) == part:
            part.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    check_room("the lens", tmp_path, 1, tmp_path / "partial")
    assert not part.exists()


def test_a_full_disk_is_named_and_the_old_file_remains(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4e6))
    check_room("the corpus", tmp_path, 8e6)
    with pytest.raises(PrismError, match=r"takes about 10\.0 MB, and 4\.0 MB are free"):
        check_room("the corpus", tmp_path, 10e6)
    monkeypatch.undo()
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


def test_json_has_null_for_nan_and_infinity(tmp_path):
    row = {"ce": float("nan"), "of": [1.5, float("inf"), (float("-inf"), "NaN")], "ä": None}
    expected = {"ce": None, "of": [1.5, None, [None, "NaN"]], "ä": None}
    text = json_text(row)
    assert json.loads(text, parse_constant=pytest.fail) == expected
    assert "ä" in text
    assert "ä" not in json_text(row, ensure_ascii=True)
    write_json(tmp_path / "a.json", row)
    write_history(tmp_path, [row])
    for name in ("a.json", "training.jsonl"):
        assert json.loads((tmp_path / name).read_text(encoding="utf-8")) == expected


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000, '{"a": "\xe4"}'])
def test_invalid_json_is_refused(tmp_path, text):
    file = tmp_path / "meta.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"meta\.json is not valid JSON"):
        read_json(file)


TEXT = "Käse, tea and 42 words.\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TEXT.encode("utf-16"), "is a binary file, or text in UTF-16.*iconv -f UTF-16 -t"),
        (TEXT.encode("latin-1"), "is not UTF-8: byte 0xe4 at offset 1. Convert it with iconv"),
        (b"\x1f\x8b\x08\x01\x02\x03\x04\x05\x06", "is a binary file"),
        (b"words and\0words", "is a binary file"),
    ],
)
def test_the_encoding_of_other_files_is_named(data, message):
    with pytest.raises(InputError, match=f"^notes.txt {message}"):
        decoded(data, "notes.txt")


def test_utf8_is_decoded_without_its_byte_order_mark():
    assert decoded(TEXT.encode("utf-8-sig"), "x") == decoded(TEXT.encode(), "x") == TEXT
    assert decoded(b"", "x") == ""
    assert decoded("\x1b[0m日本語\n".encode(), "x") == "\x1b[0m日本語\n"


def test_unreadable_and_endless_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="/dev/zero is larger than 128 MiB"):
        read_text("/dev/zero")
    for path in (tmp_path, tmp_path / ("x" * 300), f"{tmp_path}/a\0b", tmp_path / "missing"):
        with pytest.raises(InputError, match="cannot be read"):
            read_text(path)
