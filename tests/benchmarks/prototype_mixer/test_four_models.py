"""Where curves cross, by hand; what is noted of a run that goes on, and kept of one that ended."""

import json
import math

import pytest
import torch

from benchmarks.prototype_mixer.four_models import KEPT, MODELS, STEPS
from benchmarks.prototype_mixer.render_four_models import crossings, plot, render
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS
from prismlm.models.checkpoint import read_checkpoint


@pytest.mark.parametrize("name", MODELS)
def test_a_kept_model_is_the_one_that_was_trained(name):
    model, tokenizer = read_checkpoint(KEPT / name)
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == trained(name)["parameters"]
    assert sum(path.stat().st_size for path in (KEPT / name).iterdir()) < 20e6
    # A sentence costs fewer nats a token than a model that knows nothing but the vocabulary.
    ids = tokenizer("The court held that the law is not to be applied.", return_tensors="pt")
    loss = model.float()(**ids, labels=ids["input_ids"]).loss.item()
    assert loss < math.log(model.config.vocab_size) - 2


def trained(name):
    return json.loads((RESULTS / "prototype_mixer" / "four_models" / f"{name}.json").read_text())


def points(*rows):
    return {step: {"tokens": tokens, "ce": ce} for step, tokens, ce in rows}


def test_curves_cross_between_steps_on_a_scale_of_logarithms():
    one = points((1, 1, 5.0), (2, math.e**2, 4.0), (3, math.e**4, 3.5), (4, math.e**5, 1.0))
    # −1, +1, +3 and −1 nats beside it: at e, and three quarters of the way from e⁴ to e⁵.
    other = points((1, 1, 6.0), (2, math.e**2, 3.0), (3, math.e**4, 0.5), (4, math.e**5, 2.0))
    assert crossings(one, other) == pytest.approx([math.e, math.e**4.75])
    assert crossings(one, {1: other[1], 4: other[4]}) == []


def test_lengths_stand_side_by_side_by_hand():
    def run(perplexity, tokens, *losses):
        curve = [{"step": k, "tokens": k * 1e6, "ce": ce} for k, ce in enumerate(losses, 1)]
        ended = {"perplexity": perplexity, "tokens": tokens, "curve": curve, "rate": 8e-4}
        return ended | {"environment": environment()}

    found = {
        STEPS: {"protot": run(66.0, 20e6, 4.0, 3.0), "llama": run(60.0, 20e6, 5.0, 2.0)},
        1500: {"protot": run(150.0, 3e6, 5.0), "llama": run(200.0, 3e6, 5.5)},
    }
    short = [
        {"model": "llama", "rate": rate, "perplexity": 100 * rate, "parameters": 5}
        | {"environment": environment()}
        for rate in (8e-4, 1.6e-3)
    ]
    tried = {1500: [run(140.0, 3e6, 5.0) | {"model": "protot", "rate": 4e-4}]}
    page = render(short, found, tried)
    assert "| ProtoT | 0.0004: 140.0 (0.700), **0.0008: 150.0** (0.750) |" in page
    assert "its length, the two cross between 3.0 M and 20.0 M**" in page
    assert "over LLaMA's is 0.700 after 3.0 M tokens, 1.100 after 20.0 M tokens." in page
    assert "| | 1,500 steps, 3.0 M tokens | × LLaMA's | 11,000 steps, 20.0 M tokens | × LL" in page
    assert "| ProtoT | 150.0 | 0.750 | 66.0 | 1.100 | 1.15 |" in page
    assert "| LLaMA | 200.0 | 1.000 | 60.0 | 1.000 | 1.00 |" in page
    assert "but for" not in page
    again = found | {1500: {"llama": found[1500]["llama"] | {"rate": 1.6e-3}}}
    assert "are the best above, but for: LLaMA in 1,500 steps 0.0016.\n" in render(short, again, {})
    assert "| DeltaNet | – | – | – | – | 1.15 |" in page
    assert "Not trained for 11,000 steps yet: Mamba 2, DeltaNet." in page
    # 234.9 M tokens ten times are 117.45 times 20 M.
    assert "10 times over, 117 times as many" in page
    # −1 and +1 nats beside LLaMA, at 1 and 2 million: half of the way in logarithms.
    assert "crosses LLaMA's at 1.4 M tokens** (between two evaluations" in page
    assert "after 2.0 M tokens its perplexity is 2.718 × LLaMA's." in page
    assert plot(found).count("<polyline") == 4
