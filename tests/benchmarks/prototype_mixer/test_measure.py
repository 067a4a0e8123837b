"""The long runs of ProtoT and LLaMA: the script."""

import json
import math

import pytest

from benchmarks.prototype_mixer import measure


def test_a_run_is_measured_once_and_goes_on_where_it_was_cut(
    tiny_corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measure, "POSITIONS", 256)
    monkeypatch.setattr(measure, "LENGTH", 32)
    command = ["measure.py", str(tiny_corpus), "longer", "--steps", "3", "--threads", "1"]
    command += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "prototype_mixer")]
    monkeypatch.setattr("sys.argv", command)
    measure.main()
    files = sorted((tmp_path / "prototype_mixer").iterdir())
    assert [path.name for path in files] == ["longer-llama-32-0.json", "longer-protot-32-0.json"]
    row = json.loads(files[1].read_text(encoding="utf-8"))
    assert row["perplexity"] == pytest.approx(math.exp(row["ce"]))
    # Hardly trained, it is not far from guessing among 2,048 tokens.
    assert 200 < row["perplexity"] < 3000
    assert 0 < row["tokens"] <= 3 * 256
    assert not row["resumed"]
    assert not any((tmp_path / "work").iterdir())

    before = files[1].stat().st_mtime_ns
    files[0].unlink()
    (tmp_path / "work" / "longer-llama-32-0").mkdir()
    capsys.readouterr()
    measure.main()
    assert files[1].stat().st_mtime_ns == before
    assert "longer-protot-32-0.json is there" in capsys.readouterr().out
    assert json.loads(files[0].read_text(encoding="utf-8"))["resumed"]
