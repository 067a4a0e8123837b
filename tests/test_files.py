"""Files are whole or not there, and as open to others as any file."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from prismlm.files import atomic_file, share


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
