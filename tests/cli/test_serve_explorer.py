"""prismlm explore as a process: its address, its end, and what it refuses."""

import contextlib
import http.client
import json
import signal
import socket
import time
from http.cookies import SimpleCookie
from pathlib import Path
from urllib.parse import urlsplit

from tests.helpers import forked


def test_it_serves_until_ctrl_c(tiny_model):
    process = forked.start("explore", tiny_model, "--port", "0", "--no-browser")
    try:
        said = Path(process.streams.name) / "stderr"
        deadline = time.monotonic() + 60
        while "Ctrl-C" not in said.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        line = said.read_text().splitlines()[0]
        assert line.startswith(f"Explore {tiny_model.name} at http://127.0.0.1:")
        address = urlsplit(line.split(" at ")[1].strip())
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", f"/?{address.query}")
            response = connection.getresponse()
            response.read()
            (cookie,) = SimpleCookie(response.headers["set-cookie"]).values()
            sent = {"Cookie": f"{cookie.key}={cookie.value}"}
            connection.request("GET", "/api/model", headers=sent)
            assert json.loads(connection.getresponse().read())["prototypes"] == 192
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=20)[1]
        assert process.returncode == 0
        assert errors.endswith("stopped\n")
    finally:
        process.kill()


def test_a_port_in_use_is_told_before_anything_is_read(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused("explore", "no such model", "--port", port)
    assert f"port {port}" in message
    assert "--port 0" in message
    assert "every address" in refused("explore", "no such model", "--host", "")
    assert "an address of this machine" in refused("explore", "no such model", "--host", "8.8.8.8")
