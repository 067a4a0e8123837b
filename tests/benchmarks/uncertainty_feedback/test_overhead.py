"""What uncertainty feedback costs, timed at a tiny size."""

from benchmarks.uncertainty_feedback import overhead
from prismlm.files import read_json
from tests.benchmarks.scripts import run


def test_every_form_is_timed_over_the_model_without_feedback(tmp_path, monkeypatch):
    out = tmp_path / "overhead.json"
    words = "--width 32 --layers 2 --vocabulary 300 --levels 128 --rounds 3 --length 24 --prompt 8"
    run(overhead, monkeypatch, *words.split(), "--tokens", 8, "--threads", 1, "--out", out)
    result = read_json(out)
    assert {part: set(forms) for part, forms in result["timed"].items()} == {
        "decode": {"one pass"},
        "prefill": {"one pass", "two passes"},
        "step": {"one pass", "two passes"},
    }
    parameters = 300 * 32 + 1024 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert (result["model"]["parameters"], result["model"]["table"]) == (parameters, 128 * 32)
    found = result["timed"]["step"]["two passes"]["elapsed"]
    assert found["low"] <= found["ratio"] <= found["high"]
