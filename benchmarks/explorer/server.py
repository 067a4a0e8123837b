"""A running ``prismlm explore``, and those who ask it, each on a connection of their own."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

MIB = 2**20


class Explorer:
    """A process that serves a model until the block ends.

    Args:
        model: the model directory.
        module: what is run: the command itself, or one that adds to it.
    """

    def __init__(self, model: Path, module: str = "prismlm") -> None:
        command = [sys.executable, "-m", module, "explore", str(model), "--port", "0"]
        self._command = [*command, "--no-browser"]

    def __enter__(self) -> Explorer:
        began = time.perf_counter()
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said: list[str] = []
        for line in self.process.stderr:
            said.append(line)
            if found := re.search(r"(http://127\.0\.0\.1:(\d+)/\?token=(\S+))", line):
                self.address, self.port, self.token = found[1], int(found[2]), found[3]
                break
        else:
            raise SystemExit("the explorer did not start:\n" + "".join(said))
        # What it says later must not fill the pipe.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        # The port is open before the model is: the first answer is when it serves.
        Client(self).get("/api/model")
        self.seconds_to_start = time.perf_counter() - began
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)

    def processor_seconds(self) -> float:
        """Return what the process has used so far, of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, float]:
        """Return its memory in MiB: resident, its own, and the largest resident so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
        names = {"resident": "VmRSS", "own": "RssAnon", "largest": "VmHWM"}
        return {said: int(kib[name]) * 1024 / MIB for said, name in names.items()}


class Client:
    """One connection that is kept.

    Args:
        explorer: what is asked.
    """

    def __init__(self, explorer: Explorer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", explorer.port, timeout=600)
        self._key = {"Authorization": f"Bearer {explorer.token}"}

    def get(self, path: str) -> bytes:
        """Return the body at a path that must succeed, or lead elsewhere."""
        self._connection.request("GET", path, headers=self._key)
        return self._read(path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON that a body is answered with."""
        self._send(path, body)
        return json.loads(self._read(path))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, str, Any]]:
        """Yield the events that a body is answered with: when each came, its name and data."""
        self._send(path, body)
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {response.read()[:500]!r}")
        name = ""
        for line in response:
            now = time.perf_counter()
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield now, name, json.loads(line[6:])

    def _send(self, path: str, body: dict[str, Any]) -> None:
        sent = self._key | {"Content-Type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), sent)

    def _read(self, path: str) -> bytes:
        response = self._connection.getresponse()
        data = response.read()
        if response.status not in (200, 303):
            raise SystemExit(f"{path}: {response.status} {data[:500]!r}")
        return data


def timed(
    explorer: Explorer, visits: Sequence[Sequence[str]], clients: int
) -> tuple[list[float], float]:
    """Make visits, each some paths one after another, by so many clients at once.

    Returns:
        The seconds of each visit, and the processor seconds of the server for one.
    """
    seconds: list[float] = []
    failed: list[BaseException] = []
    waiting = iter(list(visits))
    before: list[float] = []
    together = threading.Barrier(clients, lambda: before.append(explorer.processor_seconds()))

    def ask() -> None:
        try:
            client = Client(explorer)
            client.get("/api/model")
            together.wait()
            # Taking the next of a list's iterator is one step of the interpreter.
            for paths in waiting:
                began = time.perf_counter()
                for path in paths:
                    client.get(path)
                seconds.append(time.perf_counter() - began)
        except BaseException as error:
            failed.append(error)
            together.abort()

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return seconds, (explorer.processor_seconds() - before[0]) / len(seconds)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as that share of all values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def first_view(explorer: Explorer) -> list[str]:
    """Return the paths that the first view loads, of the address that is opened to the model."""
    client = Client(explorer)
    page = client.get("/").decode()
    paths: list[str] = []
    found = re.findall(r'(?:href|src)="(/static/[^"]+)"', page)
    while found:
        path = found.pop()
        if path in paths:
            continue
        paths.append(path)
        if path.endswith(".js"):
            loaded = re.findall(r'\bfrom\s*"(\.[^"]+)"', client.get(path).decode())
            found += [urljoin(path, name) for name in loaded]
    return [f"/?token={explorer.token}", "/", *sorted(paths), "/api/model"]
