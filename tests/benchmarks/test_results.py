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
    assert len(RENDERERS) == 35


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


@pytest.mark.parametrize(
    ("renderer", "missing"),
    [
        ("attribution/render", "attribution_wordings"),
        ("attribution/render_retraining", "attribution_bergson.json"),
        ("attribution/render_retraining", "attribution_removed.json"),
        ("attribution/render_retraining", "attribution_forgetting.json"),
        ("attribution/render_retraining", "attribution_ekfac_time.json"),
        ("explorer/render", "explorer_map.json"),
        ("prototype_head/render", "first_light.json"),
        ("prototype_head/render", "route.json"),
        ("prototype_mixer/render_robustness", "prototype_mixer"),
        ("prototype_mixer/render_timing", "mixer_throughput.json"),
        ("signal_noise_attention/render", "signal_noise_attention.json"),
        ("signal_noise_attention/render", "signal_noise_readings"),
        ("signal_noise_attention/render", "stories.json"),
        ("uncertainty_feedback/render", "uncertainty_checks"),
        ("uncertainty_feedback/render", "uncertainty_literal"),
        ("uncertainty_feedback/render", "uncertainty_overhead.json"),
    ],
)
def test_every_part_of_a_page_has_to_be_there(renderer, missing, tmp_path, monkeypatch):
    for path in (ROOT / "docs" / "results").iterdir():
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    path = ROOT / "benchmarks" / f"{renderer}.py"
    said = ends(path, monkeypatch, "--results", tmp_path, "--check")
    assert said.startswith(f"{tmp_path / missing}")
    assert " is missing: `python -m benchmarks." in said
