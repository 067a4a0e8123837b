"""Published pages are what their JSON gives, and none is without it."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


RENDERERS = sorted(
    path for path in (ROOT / "benchmarks").rglob("*.py") if path.stem.startswith("render")
)
of_every_renderer = pytest.mark.parametrize(
    "path", RENDERERS, ids=lambda path: f"{path.parent.name}-{path.stem}"
)


def ends(path, monkeypatch, *words):
    """Return what a script ends with: a status, or the message of a failure."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [path.name, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    return ended.value.code


def test_every_folder_of_benchmarks_that_writes_a_page_is_found():
    assert len(RENDERERS) == 15


@of_every_renderer
def test_a_page_is_rendered_from_its_json(path, monkeypatch, capsys):
    assert ends(path, monkeypatch, "--check") == 0, capsys.readouterr().out


@of_every_renderer
@pytest.mark.parametrize("words", [[], ["--check"]], ids=["write", "check"])
def test_no_page_is_rendered_without_its_json(path, words, tmp_path, monkeypatch):
    said = ends(path, monkeypatch, "--results", tmp_path, *words)
    # A message is printed, and the status is 1.
    missing = re.fullmatch(r"(\S+\.json) is missing: `([^`]+)` writes it", said)
    assert Path(missing[1]).is_relative_to(tmp_path)
    assert not list(tmp_path.iterdir())
    script = re.match(r"python -m (benchmarks\.\S+)|pytest .* (tests/\S+\.py) ", missing[2])
    assert Path(script[2] or script[1].replace(".", "/") + ".py").is_file()
