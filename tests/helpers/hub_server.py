"""A server that speaks the routes of the Hugging Face Hub that pushing and loading use."""

import base64
import hashlib
import json

from fastapi import FastAPI, HTTPException, Request, Response

from tests.helpers.running import Running


class Hub(Running):
    """Repositories by name, each a list of commits, which are files by path.

    ``private`` has the names of those made private.
    """

    def __init__(self):
        super().__init__(self.routes)
        self.url = f"http://{self.host}"
        self.repositories, self.private = {}, set()

    def commit(self, name, revision):
        """Return the number and the files of a commit."""
        if name not in self.repositories:
            raise missing("RepoNotFound")
        commits = self.repositories[name]
        numbers = {sha(number): number for number in range(len(commits))}
        number = (numbers | {"main": len(commits) - 1}).get(revision)
        if number is None:
            raise missing("RevisionNotFound")
        return number, commits[number]

    def routes(self, host):
        app = FastAPI()
        self.add_reading(app)
        self.add_pushing(app)
        return app

    def add_reading(self, app):
        """Add the routes that load a repository."""

        @app.get("/")
        def root():
            return {}

        @app.get("/api/models/{owner}/{name}")
        @app.get("/api/models/{owner}/{name}/revision/{revision}")
        def about(owner, name, revision="main"):
            known = f"{owner}/{name}"
            number, files = self.commit(known, revision)
            siblings = [{"rfilename": path} for path in files]
            private = known in self.private
            return {"id": known, "sha": sha(number), "private": private, "siblings": siblings}

        @app.get("/api/models/{owner}/{name}/tree/{revision}")
        def tree(owner, name, revision):
            _, files = self.commit(f"{owner}/{name}", revision)
            return [
                {"type": "file", "path": path, "size": len(data), "oid": digest(data)}
                for path, data in files.items()
            ]

        @app.api_route("/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
        def resolve(owner, name, revision, path):
            number, files = self.commit(f"{owner}/{name}", revision)
            if path not in files:
                raise missing("EntryNotFound")
            headers = {"ETag": f'"{digest(files[path])}"', "X-Repo-Commit": sha(number)}
            return Response(files[path], headers=headers)

    def add_pushing(self, app):
        """Add the routes that make a repository and commit to it."""

        @app.post("/api/repos/create")
        async def create(request: Request, response: Response):
            asked = await request.json()
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            if name in self.repositories:
                response.status_code = 409
            elif asked.get("private") or asked.get("visibility") == "private":
                self.private.add(name)
            self.repositories.setdefault(name, [{}])
            return {"url": f"{self.url}/{name}"}

        @app.post("/api/validate-yaml")
        def validate():
            return {"errors": [], "warnings": []}

        @app.post("/api/models/{owner}/{name}/preupload/main")
        async def preupload(owner, name, request: Request):
            files = (await request.json())["files"]
            how = {"shouldIgnore": False, "uploadMode": "regular"}
            return {"files": [{"path": file["path"]} | how for file in files]}

        @app.post("/api/models/{owner}/{name}/commit/main")
        async def commit(owner, name, request: Request):
            commits = self.repositories[f"{owner}/{name}"]
            files = dict(commits[-1])
            for operation in map(json.loads, (await request.body()).splitlines()):
                if operation["key"] == "file":
                    value = operation["value"]
                    files[value["path"]] = base64.b64decode(value["content"])
            commits.append(files)
            oid = sha(len(commits) - 1)
            url = f"{self.url}/{owner}/{name}/commit/{oid}"
            return {"commitUrl": url, "commitOid": oid, "success": True}


def missing(code):
    """Return the answer that something is not there."""
    return HTTPException(404, headers={"X-Error-Code": code})


def digest(data):
    """Return what tells a file's content."""
    return hashlib.sha256(data).hexdigest()


def sha(number):
    """Return the name of a commit."""
    return hashlib.sha1(str(number).encode()).hexdigest()
