"""The check of direct parts: its figures by hand, and a run on a small model."""

import json
import math

import pytest
import torch

from benchmarks.prototype_mixer import chain
from tests.helpers.chain_models import chain_model


def test_agreement_by_hand():
    found = chain.agreement([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0], [4.0, -1.0]])
    assert found["cases"] == 4
    assert found["same_sign"] == 0.75
    # Ratios 2, 2, 2 and −¼.
    assert found["median_ratio"] == 2
    # Ranks 1 2 3 4 against 2 3 4 1: 1 − 6·12 / (4·15).
    assert found["spearman"][0] == pytest.approx(-0.2)
    # Covariance −2.5/4 of deviations 1.25 and 27.75/4… over n.
    x, y = [-1.5, -0.5, 0.5, 1.5], [-0.75, 1.25, 3.25, -3.75]
    expected = sum(a * b for a, b in zip(x, y, strict=True)) / math.sqrt(
        sum(a * a for a in x) * sum(b * b for b in y)
    )
    assert found["pearson"][0] == pytest.approx(expected)
    assert found["pearson"][1] <= found["pearson"][0] <= found["pearson"][2]


def test_a_run_and_its_page(tiny_corpus, tmp_path, monkeypatch, capsys):
    model = chain_model(tiny_corpus, tmp_path / "model")
    meta = json.loads((model / "prismlm.json").read_text(encoding="utf-8"))
    meta["provenance"] = {"steps": 7}
    (model / "prismlm.json").write_text(json.dumps(meta), encoding="utf-8")
    out = tmp_path / "chain.json"
    command = ["chain.py", str(model), str(tiny_corpus), "--positions", "10", "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    torch.manual_seed(0)
    chain.main()
    result = json.loads(out.read_text(encoding="utf-8"))
    cases = result["cases"]
    assert len(cases) + result["settings"]["left_out"] == 10
    assert result["summary"]["largest_error"] < 1e-5
    for case in cases:
        assert sum(case["shares"]) == pytest.approx(1, abs=1e-2)
        assert case["channels"]["largest"][0] >= case["channels"]["random"][0]
        assert abs(case["channels"]["smallest"][0]) <= abs(case["channels"]["largest"][0])
        assert 0 < case["distance"] <= 256
