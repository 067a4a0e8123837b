"""Files and directories are written whole or not at all; JSON and text are read with care."""

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

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
    share,
    write_json,
)
from prismlm.training.trainer import write_history


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_safetensors_files_get_the_permissions_of_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        path, model = tmp_path / "table.safetensors", tmp_path / "model"
        with atomic_file(path) as temporary:
            save_file({"a": torch.zeros(2)}, str(temporary))
        model.mkdir()
        for name in "ab":
            save_file({"a": torch.zeros(2)}, str(model / f"{name}.safetensors"))
        share(model)
        assert {mode(file) for file in (path, *model.iterdir())} == {0o666 & ~mask}
    finally:
        os.umask(before)


@pytest.mark.parametrize("error", [None, RuntimeError("stop")])
def test_a_directory_is_replaced_as_a_whole_or_not_at_all(tmp_path, error):
    target = tmp_path / "corpus"
    target.mkdir()
    (target / "text").write_text("old")
    with suppress(RuntimeError), atomic_directory(target) as temporary:
        (temporary / "text").write_text("new")
        if error:
            raise error
    assert (target / "text").read_text() == ("old" if error else "new")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_full_disk_is_named_and_the_old_file_remains(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4e6))
    check_room("the corpus", tmp_path, 8e6)
    with pytest.raises(PrismError, match=r"takes about 10\.0 MB, and 4\.0 MB are free"):
        check_room("the corpus", tmp_path, 10e6)
    monkeypatch.undo()
    file = tmp_path / "run.json"
    keep_json(file, {"before": 1})
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
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
    write_json(tmp_path / "a.json", row)
    write_history(tmp_path, [row])
    for name in ("a.json", "training.jsonl"):
        assert json.loads((tmp_path / name).read_text(encoding="utf-8")) == expected


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": "\xe4"}'])
def test_invalid_json_is_refused(tmp_path, text):
    file = tmp_path / "meta.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(FormatError, match=r"meta\.json is not valid JSON"):
        read_json(file)


def test_what_is_no_text_is_refused(tmp_path):
    text = "Käse, tea and 42 words.\n"
    for data, message in (
        (text.encode("latin-1"), "byte 0xe4 in position 1.*Convert it with iconv"),
        (b"words and\0words", "NUL"),
    ):
        with pytest.raises(InputError, match=f"^notes.txt is not UTF-8 .*{message}"):
            decoded(data, "notes.txt")
    assert decoded(text.encode("utf-8-sig"), "x") == decoded(text.encode(), "x") == text
    for path, message in (("/dev/zero", "is larger than 128 MiB"), (tmp_path, "cannot be read")):
        with pytest.raises(InputError, match=f"{path} {message}"):
            read_text(path)
