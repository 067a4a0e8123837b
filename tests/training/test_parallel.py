"""Activations computed again, and compiled blocks: the same training, seen at the same seam."""

import torch

from prismlm.training import LossWeights
from prismlm.training.parallel import blocks, compile_blocks
from tests.helpers.tiny_head import batch, make

WEIGHTS = LossWeights(
    prototype_pull=0.5,
    point_pull=0.5,
    residual=0.5,
    diversity=0.5,
    prototype_only_ce=0.5,
    prototype_only_kl=0.5,
)


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
