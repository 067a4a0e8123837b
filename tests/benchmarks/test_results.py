"""Published pages are what their JSON gives."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


RENDERERS = sorted(
    path for path in (ROOT / "benchmarks").rglob("*.py") if path.stem.startswith("render")
)


def test_every_folder_of_benchmarks_that_writes_a_page_is_found():
    assert len(RENDERERS) == 15


@pytest.mark.parametrize("path", RENDERERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_page_is_rendered_from_its_json(path, monkeypatch, capsys):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [path.name, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
