"""Published pages are what their JSON gives, and none is without it."""

import re
from pathlib import Path

import pytest

from benchmarks import render
from tests.benchmarks.scripts import run

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
# Pages say what has not been run on a GPU yet.
ON_A_GPU = ("gpu.json", "prism_gpu.json")
PAGES = sorted(path.stem for path in RESULTS.glob("*.md"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def copied(folder):
    """Link everything of docs/results/ into a folder."""
    for path in RESULTS.rglob("*"):
        if path.is_file():
            link = folder / path.relative_to(RESULTS)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    return folder


def test_every_page_has_a_template():
    assert [path.stem for path in sorted(render.TEMPLATES.glob("*.md"))] == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_rendered_from_its_json(name, monkeypatch, capsys):
    assert run(render, monkeypatch, name, "--check") == 0, capsys.readouterr().out


# Claims are read from the JSON of all the others; control has a section for each JSON.
@pytest.mark.parametrize("name", [name for name in PAGES if name not in ("claims", "control")])
def test_no_page_is_rendered_without_all_of_its_json(name, tmp_path, monkeypatch):
    """Every file or folder that a page is of is taken away once."""
    copied(tmp_path)
    asked = {}
    parsed = render.parsed
    monkeypatch.setattr(render, "parsed", lambda path: asked.setdefault(path, parsed(path)))
    render.page(name, tmp_path)
    needed = [path for path in asked if path.name not in ON_A_GPU]
    parts = {path if path.parent == tmp_path else path.parent for path in needed}
    assert parts
    for part in parts:
        moved = part.rename(tmp_path.with_name("away"))
        with pytest.raises(SystemExit) as ended:
            render.page(name, tmp_path)
        moved.rename(part)
        missing = re.fullmatch(r"(\S+) is missing(?:: `python -m (\S+)` writes it|, of a reader)",
                               str(ended.value))  # fmt: skip
        assert Path(missing[1]) == part or part in Path(missing[1]).parents
        if missing[2]:
            assert Path(missing[2].replace(".", "/") + ".py").is_file()


def test_a_page_that_is_not_what_its_json_gives_is_told(tmp_path, monkeypatch, capsys):
    copied(tmp_path)
    (tmp_path / "index.md").unlink()
    (tmp_path / "index.md").write_text("# Another\n", encoding="utf-8")
    assert run(render, monkeypatch, "index", "--results", tmp_path, "--check") == 1
    assert "index.md is not what the JSON gives" in capsys.readouterr().out
    assert run(render, monkeypatch, "index", "--results", tmp_path) == 0
    assert (tmp_path / "index.md").read_text() == (RESULTS / "index.md").read_text()
