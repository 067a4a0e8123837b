"""The libraries that the page carries are those of the manifest; it imports nothing else."""

import hashlib
import json
import re
from pathlib import Path
from urllib.parse import urljoin

from prismlm.pages.frame import ASSETS

VENDOR = ASSETS / "vendor"
LIBRARIES = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))["libraries"]
NAMED = {one["file"]: one["sha256"] for library in LIBRARIES for one in library["files"]}
# Of what imports or exports from elsewhere, minified or not, or on demand.
IMPORTED = re.compile(r"""\b(?:import|export)\b[\w*$\s{},(]*["']([^"'\n]+)["']""")
LOADED = re.compile(r'(?:href|src)="([^"]+)"')


def carried() -> set[str]:
    paths = (path for path in VENDOR.rglob("*") if path.is_file())
    return {path.relative_to(VENDOR).as_posix() for path in paths} - {"manifest.json"}


def test_every_file_is_in_the_manifest_and_as_it_was_published():
    assert carried() == set(NAMED)
    for name, digest in NAMED.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name


def test_licences_are_those_that_the_wheel_names():
    root = Path(__file__).parents[2]
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    for library in LIBRARIES:
        path = (VENDOR / library["licence_text"]).relative_to(root).as_posix()
        assert f'"{path}"' in project


def test_the_page_loads_only_own_and_vendored_modules(served):
    status, _, page = served.ask("GET", "/")
    assert status == 200
    waiting = [url for url in LOADED.findall(page.decode()) if not url.startswith("data:")]
    seen = set()
    while waiting:
        url = waiting.pop()
        name = url.removeprefix("/static/")
        assert (ASSETS / name).is_file(), url
        if name.startswith("vendor/"):
            assert name.removeprefix("vendor/") in NAMED
        if url in seen:
            continue
        seen.add(url)
        status, headers, text = served.ask("GET", url)
        assert status == 200
        assert "script-src 'self';" in headers["content-security-policy"]
        kind = {".js": "text/javascript", ".css": "text/css"}[Path(name).suffix]
        assert headers["content-type"] == f"{kind}; charset=utf-8"
        if not url.endswith(".js"):
            continue
        for wanted in IMPORTED.findall(text.decode()):
            assert wanted.startswith("."), (url, wanted)
            waiting.append(urljoin(url, wanted))
    scripts = {url.removeprefix("/static/") for url in seen if url.endswith(".js")}
    own = {path.relative_to(ASSETS).as_posix() for path in ASSETS.rglob("*.js")}
    # The others are those that a static page begins with.
    pages = {f"{name}_page.js" for name in ("audit", "channels", "map", "trace")}
    assert own - scripts == pages
    assert any(name.startswith("vendor/") for name in scripts)
