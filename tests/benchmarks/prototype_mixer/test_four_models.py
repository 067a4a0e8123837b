"""Where curves cross, by hand; what is noted of a run that goes on, and kept of one that ended."""

import json
import math

import pytest
import torch

from benchmarks.prototype_mixer.four_models import KEPT, MODELS
from benchmarks.prototype_mixer.render_four_models import crossings
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
