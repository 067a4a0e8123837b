"""benchmarks/README.md names every script, and what it writes of docs/results/."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "docs" / "results"
ROWS = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", (BENCHMARKS / "README.md").read_text(), re.M)
# Words in brackets are of what lies elsewhere.
WRITTEN = {
    script: re.findall(r"`([^`]+)`", re.sub(r"\(.*\)", "", written)) for script, written in ROWS
}


def test_every_script_has_one_row():
    scripts = [
        str(path.relative_to(BENCHMARKS))
        for path in BENCHMARKS.rglob("*.py")
        if re.search(r"^def main\(", path.read_text(), re.M)
    ]
    assert set(scripts) <= set(WRITTEN)
    assert len(ROWS) == len(WRITTEN)


def test_every_row_names_what_is_there():
    for script, files in WRITTEN.items():
        assert (BENCHMARKS / script).is_file(), script
        for file in files:
            assert (RESULTS / file).exists(), file
            assert (RESULTS / file).is_dir() == file.endswith("/"), file


def test_every_page_is_named_and_every_row_writes_something_or_says_that_it_does_not():
    for script, written in ROWS:
        assert bool(WRITTEN[script]) != written.startswith("none"), script
    named = {file for files in WRITTEN.values() for file in files}
    assert {path.name for path in RESULTS.glob("*.md")} <= named
