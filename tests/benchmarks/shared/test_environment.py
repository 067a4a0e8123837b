"""What figures were measured with is noted by every benchmark, and said where it was noted."""

import json
from datetime import date
from pathlib import Path

import pytest
import torch
import transformers

import prismlm
from benchmarks.index import render as render_index
from benchmarks.shared.environment import environment
from benchmarks.shared.pages import measured_on

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_what_is_noted():
    found = environment()
    assert date.fromisoformat(found["date"]) <= date.today()
    assert (found["prismlm"], found["torch"]) == (prismlm.__version__, torch.__version__)
    assert found["transformers"] == transformers.__version__
    assert found["machine"].endswith(f", {torch.get_num_threads()} threads, CPU")
    assert found["cores"] >= 1
    assert found["load_average"] >= 0
    json.dumps(found)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        (
            {"date": "2026-11-21", "commit": "abc", "machine": "x86_64", "python": "3.11.7",
             "torch": "2.13.0", "transformers": "5.23.0"},
            "Measured 2026-11-21 at abc on x86_64; Python 3.11.7, torch 2.13.0, "
            "transformers 5.23.0.",
        ),
        ({"machine": "x86_64", "torch": "2.13.0"}, "Measured on x86_64; torch 2.13.0."),
        (None, "When, at which commit and on what this was measured was not noted."),
    ],
)  # fmt: skip
def test_the_sentence_says_what_was_noted(where, sentence):
    assert measured_on(where) == sentence


def test_the_page_of_the_index_says_it_for_each_part():
    result = json.loads((RESULTS / "index.json").read_text(encoding="utf-8"))
    result["environment"] = {}
    missing, where = "was not noted.", environment()
    # The growth's is missing; each ratio has its own.
    assert render_index.render(result).count(missing) == 1
    result["ratio"][-1]["environment"] = where
    page = render_index.render(result)
    assert f"Measured {where['date']} at {where['commit']} on {where['machine']}; " in page
