"""Published pages are what their JSON gives."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "attribution",
        "attribution_latency",
        "chain",
        "channels",
        "edits",
        "first_light",
        "index",
        "mixer",
        "processors",
        "prototype_head",
        "prototype_mixer",
        "protopnet",
        "signal_noise_attention",
        "uncertainty_feedback",
        "uncertainty_matrix",
    ],
)
def test_a_page_is_rendered_from_its_json(page, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [f"render_{page}.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"benchmarks/render_{page}.py", run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
