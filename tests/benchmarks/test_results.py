"""Published pages are what their JSON gives, and benchmarks/README.md names every script."""

import re
from pathlib import Path

import pytest

from benchmarks import render

ROOT = Path(__file__).parents[2]
BENCHMARKS, RESULTS = ROOT / "benchmarks", ROOT / "docs" / "results"
PAGES = sorted(path.stem for path in RESULTS.glob("*.md"))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_rendered_from_its_json(name, run, capsys):
    assert run(render, name, "--check") == 0, capsys.readouterr().out


def test_a_stale_page_and_missing_json_are_told(tmp_path, run, capsys):
    with pytest.raises(SystemExit, match=r"labels.json is missing"):
        render.page("labels", tmp_path)
    (tmp_path / "labels.json").symlink_to(RESULTS / "labels.json")
    (tmp_path / "labels.md").write_text("# Another\n")
    assert run(render, "labels", "--results", tmp_path, "--check") == 1
    assert "labels.md is not what the JSON gives" in capsys.readouterr().out


def test_readme_names_every_script_and_what_it_writes():
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", (BENCHMARKS / "README.md").read_text(), re.M)
    # Words in brackets are of what lies elsewhere.
    written = {
        script: re.findall(r"`([^`]+)`", re.sub(r"\(.*\)", "", files)) for script, files in rows
    }
    scripts = {
        str(path.relative_to(BENCHMARKS))
        for path in BENCHMARKS.rglob("*.py")
        if re.search(r"^def main\(", path.read_text(), re.M)
    }
    assert scripts <= set(written)
    assert all((BENCHMARKS / script).is_file() for script in written)
    named = {file for files in written.values() for file in files}
    assert all((RESULTS / file).exists() for file in named)
    assert {f"{page}.md" for page in PAGES} <= named
