"""Files are whole or not there, and as open to others as any file."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from prismlm.files import atomic_directory, atomic_file, remove_left_behind, share


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
    inner = tmp_path / "model"
    inner.mkdir()
    save_file({"a": torch.zeros(2)}, str(inner / "model.safetensors"))
    chosen = inner / "chosen"
    chosen.touch()
    chosen.chmod(0o640)
    share(inner)
    assert mode(inner / "model.safetensors") == 0o666 & ~mask
    assert mode(chosen) == 0o640
    assert sorted(p.name for p in inner.iterdir()) == ["chosen", "model.safetensors"]


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
