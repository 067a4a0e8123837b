"""What signal and noise heads do while a model trains: heads.csv."""

import csv
import json
import math

import pytest
import torch
import yaml
from safetensors.torch import load_file

from prismlm.corpus import Corpus
from prismlm.instruments.heads import cross_terms, head_uses, layer_rates, read_states
from prismlm.models.checkpoint import read_checkpoint
from prismlm.training import build_recipe, parallel, train
from prismlm.training.evaluation import HeldOut
from prismlm.training.logs.heads import COLUMNS, HEAD_FIGURES, LayerGradients, heads_figures
from prismlm.training.logs.layers import EVALUATED, PLACE
from prismlm.training.trainer import PrismTrainer
from tests.helpers import forked
from tests.helpers.head_models import make_batch, make_signal_noise, random_rows

SIGNAL_NOISE = {
    "model_type": "prismlm_signal_noise",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "head_size": 4,
}


@pytest.fixture
def signal_noise(settings):
    settings["model"] = dict(SIGNAL_NOISE)
    settings["head"]["enabled"] = False
    settings["steps"] = 20
    settings["evaluation"] |= {"attention_head_tokens": 300}
    return settings


def read(out):
    with (out / "heads.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_the_rows_are_what_the_instruments_say_of_the_saved_model(signal_noise, tiny_corpus):
    result = train(build_recipe(signal_noise))
    rows = read(result.directory)
    assert tuple(rows[0]) == (*PLACE, *COLUMNS, *EVALUATED)
    assert [(row["step"], row["layer"]) for row in rows] == [(10, 0), (10, 1), (20, 0), (20, 1)]
    model, _ = read_checkpoint(result.directory)
    heldout = HeldOut(Corpus.open(tiny_corpus), 32, 0)
    states = read_states(model, heldout.batches(300))
    rates, terms = layer_rates(states).rows, cross_terms(states, length=32).rows[0]["layers"]
    uses = head_uses(model, heldout.batches(300))
    for layer, own, row in zip(rates, terms, rows[2:], strict=True):
        found = [row[f"cross_{n}"] for n in ("signal_noise", "signal_signal", "noise_noise")]
        expected = [own[name] for name in ("signal_noise", "signal_signal", "noise_noise")]
        assert found == pytest.approx(expected, rel=1e-5)
        assert row["cross_normalised"] == pytest.approx(own["normalised"], rel=1e-5)
        assert row["noise_weight"] == pytest.approx(0.1)
        assert row["difference"] == pytest.approx(layer["before"]["difference"], rel=1e-5)
        assert row["gain"] == pytest.approx(layer["gain"], rel=1e-4)
        assert row["incoherence"] == pytest.approx(layer["incoherence"]["own"], rel=1e-6)
        noise = [
            use["entropy"]
            for use in uses.rows
            if (use["layer"], use["group"]) == (layer["layer"], "noise")
        ]
        assert len(noise) == 4
        assert row["noise_entropy"] == pytest.approx(sum(noise) / 4, rel=1e-5)
        for name in ("distance", "self_share", "first_share"):
            signal = [
                use[name]
                for use in uses.rows
                if (use["layer"], use["group"]) == (layer["layer"], "signal")
            ]
            assert row[f"signal_{name}"] == pytest.approx(sum(signal) / 4, rel=1e-5)
    assert rows[0]["noise_weight"] < 0.1
    assert rows[2]["ce"] == result.ce


def test_reading_changes_no_weight_and_can_be_left_out(signal_noise, tmp_path):
    with_rows = train(build_recipe(signal_noise)).directory
    signal_noise["evaluation"]["attention_head_tokens"] = 0
    without = train(build_recipe(signal_noise | {"out": str(tmp_path / "without")})).directory
    assert not (without / "heads.csv").exists()
    first, second = (load_file(out / "model.safetensors") for out in (with_rows, without))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_at_the_end_the_rest_is_in_a_report(signal_noise):
    out = train(build_recipe(signal_noise)).directory
    report = json.loads((out / "heads.json").read_text())
    assert report["options"]["trained_length"] == 32
    assert [len(report[name]["rows"]) for name in ("rates", "cross_terms")] == [2, 13]
    own = report["cross_terms"]["rows"][0]
    assert own["ratio"] == "own"
    # Scaling of the base leaves the first pairs of both groups alike.
    assert own["denominator"] == {"value": 0.0, "n": 1, "m": 1}
    assert own["later_denominator"]["value"] > 0
    buckets = report["loss"]["rows"]
    assert (buckets[0]["low"], buckets[-1]["high"]) == (1, 63)
    assert all(math.isfinite(bucket["loss"]) for bucket in buckets)
    beyond = [bucket for bucket in buckets if bucket["low"] >= 32]
    assert beyond
    assert all(math.isfinite(bucket["difference"]) for bucket in beyond)


def test_gradients_of_layers_are_those_before_clipping(signal_noise, monkeypatch):
    """Their norms and that of the rest make up the one that the history has."""
    signal_noise["optimizer"] |= {"max_grad_norm": 1e-3}
    signal_noise["logging"]["every"] = 1
    outside = []
    clip = PrismTrainer._clip_grad_norm

    def noted(self, model):
        if self.state.global_step in (9, 19):
            decoder = self.model.model
            inside = {id(p) for p in decoder.model.layers.parameters()}
            rest = [p.grad for p in decoder.parameters() if id(p) not in inside]
            outside.append(sum(float(grad.square().sum()) for grad in rest))
        return clip(self, model)

    monkeypatch.setattr(PrismTrainer, "_clip_grad_norm", noted)
    result = train(build_recipe(signal_noise))
    whole = {row["step"]: row["grad_norm"] for row in result.history if "grad_norm" in row}
    rows = read(result.directory)
    for step, rest in zip((10, 20), outside, strict=True):
        layers = [row["gradient_norm"] for row in rows if row["step"] == step]
        assert len(layers) == 2
        assert sum(norm**2 for norm in layers) + rest == pytest.approx(whole[step] ** 2, rel=1e-4)
        assert whole[step] > 1e-2


def test_reading_takes_one_forward_pass_without_logits(signal_noise, tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    model = make_signal_noise(len(corpus.tokenizer))
    heldout = HeldOut(corpus, 32, 0)
    calls, logits = [], []
    model.model.register_forward_pre_hook(lambda *_: calls.append(1))
    model.lm_head.register_forward_pre_hook(lambda *_: logits.append(1))
    gradients = LayerGradients(model.model.layers, build_recipe(signal_noise))
    rows = heads_figures(model, heldout.batches(9000), 32, gradients)
    assert len(calls) == len(list(heldout.batches(9000))) > 1
    assert not logits
    assert all(math.isnan(row["gradient_norm"]) for row in rows)


COMPILED = """
import sys, yaml
from functools import partial
from prismlm.training import build_recipe, parallel, train
graphs = []
def backend(graph, example_inputs):
    graphs.append(graph)
    return graph.forward
parallel.compile_blocks = partial(parallel.compile_blocks, backend=backend)
train(build_recipe(yaml.safe_load(open(sys.argv[1]))))
print(len(graphs))
"""


def test_a_compiled_model_is_read_as_one_that_is_not(signal_noise, tmp_path):
    straight = train(build_recipe(signal_noise | {"out": str(tmp_path / "straight")})).directory
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(signal_noise | {"compile": True}))
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = forked.run(recipe, code=COMPILED)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "the blocks were compiled"
    compiled = tmp_path / "model"
    for one, other in zip(read(compiled), read(straight), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    report, expected = (
        json.loads((out / "heads.json").read_text()) for out in (compiled, straight)
    )
    for one, other in zip(report["rates"]["rows"], expected["rates"]["rows"], strict=True):
        assert one["gain"] == pytest.approx(other["gain"], rel=1e-3)


def test_short_rows_are_read_from_queries_that_see_all_of_them(signal_noise, tiny_corpus):
    signal_noise["data"]["length"] = 8
    out = train(build_recipe(signal_noise)).directory
    model, _ = read_checkpoint(out)
    heldout = HeldOut(Corpus.open(tiny_corpus), 8, 0)
    uses = head_uses(model, heldout.batches(300), least_visible=8)
    for row in read(out)[2:]:
        noise = [
            u["entropy"] for u in uses.rows if (u["layer"], u["group"]) == (row["layer"], "noise")
        ]
        assert row["noise_entropy"] == pytest.approx(sum(noise) / 4, rel=1e-5)
        assert row["attention_tokens"] == uses["tokens"]


def test_where_no_query_sees_enough_the_rest_of_the_row_is_there(signal_noise):
    model = make_signal_noise()
    batches = [make_batch(*random_rows(9, 12))]
    gradients = LayerGradients(model.model.layers, build_recipe(signal_noise))
    for length, nothing in ((12, False), (13, True), (32, True)):
        for row in heads_figures(model, batches, length, gradients):
            assert row["positions"] == 21
            assert math.isfinite(row["rate"])
            assert row["attention_tokens"] == (0 if nothing else 21)
            heads = [row[f"{g}_{n}"] for g in ("signal", "noise") for n in HEAD_FIGURES]
            assert all(math.isnan(value) == nothing for value in heads)


def test_blocks_are_compiled_again_after_a_reading():
    model = make_signal_noise()
    parallel.compile_blocks(model, "eager")
    graphs = [block._compiled_call_impl for block in parallel.blocks(model)]
    assert None not in graphs
    with parallel.uncompiled(model):
        assert all(module._compiled_call_impl is None for module in model.modules())
    assert [block._compiled_call_impl for block in parallel.blocks(model)] == graphs
