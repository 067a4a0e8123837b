"""prismlm train --search: what is printed of its trials."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prismlm.cli.train import _search
from prismlm.training import SearchResult, TrialResult

VALUES: dict[str, Any] = {"batch_tokens": 16_384, "optimizer.learning_rate": 0.00123456}
TEXT = "batch_tokens 16384, optimizer.learning_rate 0.001235"
TRIALS = (
    TrialResult(0, 3.25, 0.0125, VALUES, None, [3.24, 3.26]),
    TrialResult(1, None, None, VALUES, "the loss is nan", []),
)


def test_trials_are_shown_with_the_keys_and_values_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(*_: Any, on_trial: Any, **_options: Any) -> SearchResult:
        for trial in TRIALS:
            on_trial(trial)
        return SearchResult(Path("search"), TRIALS)

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("prismlm.training.search", search)
    recipe: Any = SimpleNamespace(search=SimpleNamespace(trials=2))
    _search(recipe, resume=False, as_json=False)
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        f"trial 0 of 2 ({TEXT}): CE 3.2500 ± 0.0125",
        f"trial 1 of 2 ({TEXT}): failed: the loss is nan",
    ]
    (row,) = (line for line in shown.out.splitlines() if "3.2500" in line)
    assert row.split() == ["0", "3.2500", "0.0125", *TEXT.split()]
