"""The page of the judge: what it says of claims, of a judge that is unusable, and foreign text."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks.prototype_mixer.render_judge import render

MADE = Path(__file__).parents[3] / "docs/results/prototype_mixer/judge/SmolLM2-135M-Instruct.json"


def interval(value, half=0.05):
    return {"value": value, "low": value - half, "high": value + half}


@pytest.fixture
def result():
    """A study of two models by a judge that is usable."""
    found = json.loads(MADE.read_text())
    found["judge"] |= {"usable": True, "reasons": []}
    score = {"games": 20, "won": 12, "lost": 4, "score": interval(0.7)}
    found["ratings"] = {
        "readable": True,
        "models": [
            {"model": name, "elo": interval(1010.0, 5), "bradley_terry": interval(1100.0, 40)}
            for name in ("llama", "protot")
        ],
        "pairs": [{"first": "llama", "second": "protot", **score}],
        "order": found["judge"]["order"],
    }
    return found


def test_text_of_models_is_only_shown(result):
    one = {"model": "llama", "text": "<b>\x1b[31m\u202e|*x*", "bleu": 1.0, "unsmoothed": 0.0}
    sample = {"best": "llama", "id": "1", "text": "a\n# b", "reference": "c", "texts": [one]}
    row = {key: interval(2.0) for key in ("mean", "other_prompt", "difference")} | {"corpus": 1.0}
    result["bleu"] = {"prompts": 20, "models": {"llama": row}, "samples": [sample]}
    page = render([copy.deepcopy(result)])
    assert r"LLaMA (1.0, unsmoothed 0.0): \<b\>�\[31m‹U+202E›\|\*x\*" in page
    assert r"Prompt: a \# b" in page
