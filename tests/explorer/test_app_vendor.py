"""The libraries that the page carries are those of the manifest; it imports nothing else."""

import hashlib
import json
import re
from pathlib import Path

from prismlm.pages.frame import ASSETS

VENDOR = ASSETS / "vendor"
LIBRARIES = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))["libraries"]
NAMED = {one["file"]: one["sha256"] for library in LIBRARIES for one in library["files"]}
# Of what imports or exports from elsewhere, minified or not, or on demand.
IMPORTED = re.compile(r"""\b(?:import|export)\b[\w*$\s{},(]*["']([^"'\n]+)["']""")


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


def test_the_page_imports_only_own_and_vendored_modules():
    for path in ASSETS.glob("*.js"):
        for wanted in IMPORTED.findall(path.read_text(encoding="utf-8")):
            name = (path.parent / wanted).resolve().relative_to(ASSETS.resolve()).as_posix()
            assert (ASSETS / name).is_file(), (path.name, wanted)
            assert not name.startswith("vendor/") or name.removeprefix("vendor/") in NAMED
