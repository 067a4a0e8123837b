"""The page of the judge shows foreign text, and lets none of it become markup."""

import json
from pathlib import Path

from benchmarks.prototype_mixer.render_judge import render

MADE = Path(__file__).parents[3] / "docs/results/prototype_mixer/judge/SmolLM2-135M-Instruct.json"


def interval(value, half=0.05):
    return {"value": value, "low": value - half, "high": value + half}


def test_text_of_models_is_only_shown():
    result = json.loads(MADE.read_text())
    one = {"model": "llama", "text": "<b>\x1b[31m\u202e|*x*", "bleu": 1.0, "unsmoothed": 0.0}
    sample = {"best": "llama", "id": "1", "text": "a\n# b", "reference": "c", "texts": [one]}
    row = {key: interval(2.0) for key in ("mean", "other_prompt", "difference")} | {"corpus": 1.0}
    result["bleu"] = {"prompts": 20, "models": {"llama": row}, "samples": [sample]}
    page = render([result])
    assert r"LLaMA (1.0, unsmoothed 0.0): \<b\>�\[31m‹U+202E›\|\*x\*" in page
    assert r"Prompt: a \# b" in page
