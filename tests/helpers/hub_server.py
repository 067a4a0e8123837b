"""A server that speaks the routes of the Hugging Face Hub that pushing and loading use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a list of commits: files by path.

    Attributes:
        repositories: by name.
        private: names of those made private.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, list[dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.large: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Give a file, or what is known of a repository."""
        if self.path == "/":
            return self.answer({})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self.path):
            commit = self.commit_of(found[1], found[2] or "main")
            if commit is not None:
                number, files = commit
                siblings = [{"rfilename": name} for name in files]
                about = {"id": found[1], "sha": sha(number), "siblings": siblings, "tags": []}
                self.answer(about | {"private": found[1] in self.server.private})
            return None
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/?]+)\?.*", self.path):
            commit = self.commit_of(found[1], found[2])
            if commit is not None:
                entries = {name: (len(data), digest(data)) for name, data in commit[1].items()}
                self.answer(
                    [
                        {"type": "file", "path": name, "size": size, "oid": oid}
                        for name, (size, oid) in entries.items()
                    ]
                )
            return None
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        if found is None:
            return self.missing("EntryNotFound")
        commit = self.commit_of(found[1], found[2])
        if commit is None:
            return None
        data = commit[1].get(found[3])
        if data is None:
            return self.missing("EntryNotFound")
        return self.send(200, data, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": sha(commit[0])})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Make a repository, say how files are to come, or take a commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        repositories = self.server.repositories
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in repositories:
                return self.answer({"url": f"{self.server.url}/{name}"}, 409)
            repositories[name] = [{}]
            if asked.get("private") or asked.get("visibility") == "private":
                self.server.private.add(name)
            return self.answer({"url": f"{self.server.url}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] > 1000 else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{self.server.url}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path)
        assert found, self.path
        files = dict(repositories[found[1]][-1])
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        repositories[found[1]].append(files)
        oid = sha(len(repositories[found[1]]) - 1)
        url = f"{self.server.url}/{found[1]}/commit/{oid}"
        return self.answer({"commitUrl": url, "commitOid": oid, "success": True})

    def do_PUT(self) -> None:
        """Take a large file."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.large[self.path.rsplit("/", 1)[1]] = data
        self.send(200, b"", {})

    def commit_of(self, name: str, revision: str) -> tuple[int, dict[str, bytes]] | None:
        """Return a commit's number and files; answer that there is none, and return None."""
        commits = self.server.repositories.get(name)
        if commits is None:
            return self.missing("RepoNotFound")
        if revision == "main":
            return len(commits) - 1, commits[-1]
        numbers = [number for number in range(len(commits)) if sha(number) == revision]
        if not numbers:
            return self.missing("RevisionNotFound")
        return numbers[0], commits[numbers[0]]

    def missing(self, code: str) -> None:
        """Answer 404."""
        self.send(404, b"{}", {"X-Error-Code": code})

    def answer(self, value: Any, status: int = 200) -> None:
        """Answer JSON."""
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def digest(data: bytes) -> str:
    """Return what tells a file's content."""
    return hashlib.sha256(data).hexdigest()


def sha(number: int) -> str:
    """Return the name of a commit."""
    return hashlib.sha1(str(number).encode()).hexdigest()


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve an empty hub during the block."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
