"""Where curves cross, by hand; what is noted of a run that goes on, and kept of one that ended."""

import json
import math

import pytest
import torch

from benchmarks.prototype_mixer.four_models import KEPT, MODELS, note_so_far
from benchmarks.prototype_mixer.render_four_models import crossings, render
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


def test_a_run_that_goes_on_is_noted_and_one_that_has_ended_no_more(tmp_path):
    out, run = tmp_path / "out", tmp_path / "work" / "llama"
    run.mkdir(parents=True)
    out.mkdir()
    (out / "llama-0.1.json").write_text('{"rate": 0.1, "perplexity": 9.0}')
    (out / "llama-0.2.json").write_text('{"rate": 0.2, "perplexity": 8.0}')
    rows = [{"step": 10, "tokens": 160}, {"step": 10, "eval_ce": 2.5}, {"step": 20, "tokens": 320}]
    (run / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    note_so_far(out, tmp_path / "work", "llama", 40)
    noted = json.loads((out / "so_far" / "llama.json").read_text())
    assert (noted["rate"], noted["steps"]) == (0.2, 40)
    assert noted["curve"] == [{"step": 10, "tokens": 160, "ce": 2.5}]
    (out / "llama.json").write_text('{"steps": 30}')
    note_so_far(out, tmp_path / "work", "llama", 40)
    assert (out / "so_far" / "llama.json").exists()
    (out / "llama.json").write_text('{"steps": 40}')
    note_so_far(out, tmp_path / "work", "llama", 40, tmp_path / "page")
    assert json.loads((tmp_path / "page" / "llama.json").read_text()) == {"steps": 40}
    note_so_far(out, tmp_path / "work", "llama", 40)
    assert not (out / "so_far" / "llama.json").exists()


def test_long_runs_that_have_ended_stand_beside_those_that_have_not():
    curve = [{"step": step, "tokens": step * 1000, "ce": 4.0} for step in (1, 2)]
    run = {"steps": 9000, "curve": curve, "environment": environment()}
    runs = {
        "protot": run | {"perplexity": 66.0},
        "llama": run | {"perplexity": 60.0},
        "mamba2": run | {"curve": curve[:1]},
    }
    page = render([], {}, runs, [])
    assert "held-out tokens: ProtoT 66.0 (1.100 × LLaMA's), LLaMA 60.0. Stopped" in page
    assert "so far, at step: Mamba 2 1.\n" in page
    alone = render([], {}, {"protot": runs["protot"]}, [])
    assert "held-out tokens: ProtoT 66.0.\n" in alone
