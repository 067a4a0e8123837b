"""Activations computed again, and compiled blocks: the same training, seen at the same seam."""

import copy

import pytest
import torch

from prismlm.errors import InputError
from prismlm.training import LossWeights, build_recipe
from prismlm.training.parallel import blocks, compile_blocks, recompute_activations
from prismlm.training.setup import prepare
from prismlm.training.trainer import PrismTrainer
from tests.helpers.tiny_head import batch, make

WEIGHTS = LossWeights(0.5, 0.5, 0.5, 0.5, 0.5, 0.5)


def run(model, inputs):
    """Return the output and every gradient, and how often W and the first block were called."""
    calls = {"W": 0, "block": 0}
    block = blocks(model.model)[0]

    def count(name):
        calls[name] += 1

    inner = block.self_attn.q_proj
    handles = [
        model.model.lm_head.register_forward_hook(lambda *_: count("W")),
        inner.register_forward_hook(lambda *_: count("block")),
    ]
    output = model(**inputs)
    output.loss.backward()
    for handle in handles:
        handle.remove()
    return output, {n: p.grad for n, p in model.named_parameters()}, calls


def assert_same(first, second):
    torch.testing.assert_close(first[0].losses, second[0].losses)
    assert torch.equal(first[0].routing.indices, second[0].routing.indices)
    for name, gradient in first[1].items():
        torch.testing.assert_close(gradient, second[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_recomputed_activations_change_nothing_and_the_state_is_seen_once():
    plain = run(make(weights=WEIGHTS), batch())
    model = make(weights=WEIGHTS)
    recompute_activations(model.model)
    again = run(model, batch())
    assert_same(plain, again)
    assert plain[2] == {"W": 1, "block": 1}
    assert again[2] == {"W": 1, "block": 2}


def test_compiled_blocks_change_nothing_and_the_seam_sees_each_pass():
    model, compiled = (make(weights=WEIGHTS, num_hidden_layers=2) for _ in range(2))
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compile_blocks(compiled.model, backend)
    for seed in (0, 1):
        inputs = batch(seed=seed)
        model.zero_grad()
        compiled.zero_grad()
        assert_same(run(model, inputs), run_compiled(compiled, inputs))
    assert graphs, "the blocks were compiled"


def run_compiled(model, inputs):
    output = model(**inputs)
    output.loss.backward()
    return output, {n: p.grad for n, p in model.named_parameters()}


def test_a_family_that_does_not_name_its_blocks_is_refused():
    model = make()
    model.model._no_split_modules = None
    for module in model.model.modules():
        if getattr(module, "_no_split_modules", None):
            module._no_split_modules = None
    with pytest.raises(InputError, match="'llama' do not say what their blocks are"):
        compile_blocks(model.model)


def losses(settings, directory):
    prepared = prepare(build_recipe(settings))
    trainer = PrismTrainer(prepared, directory)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_the_recipe_recomputes_and_trains_the_same(settings, tmp_path):
    settings |= {"steps": 12, "logging": {"every": 1, "tensorboard": False}}
    settings["head"] |= {"detach": False}
    settings["model"]["attention_dropout"] = 0.1
    plain = losses(copy.deepcopy(settings), tmp_path / "plain")
    again = losses(settings | {"gradient_checkpointing": True}, tmp_path / "again")
    assert again == pytest.approx(plain, rel=1e-6)


@pytest.mark.slow
def test_the_recipe_compiles_and_trains_the_same(settings, tmp_path):
    settings |= {"steps": 12, "logging": {"every": 1, "tensorboard": False}}
    settings["head"] |= {"detach": False}
    settings["model"]["attention_dropout"] = 0.0
    plain = losses(copy.deepcopy(settings), tmp_path / "plain")
    compiled = losses(settings | {"compile": True}, tmp_path / "compiled")
    assert compiled == pytest.approx(plain, rel=1e-4)
