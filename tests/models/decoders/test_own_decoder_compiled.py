"""torch.compile around a head, our decoders' blocks and a model with feedback; a script, too.

A case compares results and gradients in a process of its own: the run-time type checks of the test
run cannot be traced.
"""

import sys
from pathlib import Path

import pytest
import torch

from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head import fitted
from tests.helpers import forked
from tests.helpers.small_models import attach_drawn, build

SIZES = {"hidden_size": 32, "dropout": 0.0, "num_hidden_layers": 2}
BLOCKS = {
    "protot": {"preset": "protot-tiny"},
    "deltanet": {"model_type": "prismlm_deltanet"},
    "signal/noise": {"preset": "signal-noise-tiny", "head_size": 8},
}


def randint(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def head_step(weights, backend):
    """Return losses and gradients of a step, eager and as one graph."""
    # Two passes of a pursuit, as with more prototypes; the graph repeats each of their rounds.
    ops.PICKS = fitted.PICKS = 4
    fitted.ROUNDS = 8
    generator = torch.Generator().manual_seed(0)
    head = PrototypeHead(24, 70, 6, scale=1.5, weights=weights)
    head.reset_parameters(generator)
    inputs = torch.randn(2, 10, 24, generator=generator)
    mask = torch.rand(2, 10, generator=generator) < 0.8

    def step(z):
        states = torch.tanh(z)
        output = head(states, mask=mask)
        losses = head.losses(states, output, mask=mask)
        return (*output.routing, output.reconstruction, *losses)

    for form in (step, torch.compile(step, backend=backend, fullgraph=True)):
        z = inputs.clone().requires_grad_()
        head.zero_grad()
        results = form(z)
        torch.stack(results[-4:]).sum().backward()
        grads = [x.grad.clone() for x in (z, *head.parameters()) if x.grad is not None]
        assert len(results) + len(grads) == 14
        yield [*results, *grads]


def blocks_step(case, backend):
    """Return logits and gradients of a decoder, with each block one graph the second time."""
    torch.manual_seed(0)
    model, ids = build_model(build_config(BLOCKS[case] | SIZES, 100, 0)), randint(100, 2, 40)
    position_ids = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    for _ in range(2):
        model.zero_grad()
        output = model(ids, position_ids=position_ids, labels=ids, use_cache=False)
        output.loss.backward()
        yield output.logits.detach(), [p.grad.clone() for p in model.parameters()]
        for block in model.model.layers:
            block.compile(backend=backend, fullgraph=True)


def feedback_step(_case, backend):
    """Return logits and codes of a text and its next token, and the table's gradient."""
    model, ids = build("llama", 1), randint(8, 2, 4)
    attach_drawn(model, 64, passes=2)
    for form in (model, torch.compile(model, backend=backend)):
        model.zero_grad()
        output = form(ids, labels=ids, use_cache=True)
        output.loss.backward()
        later = form(ids[:, :1], past_key_values=output.past_key_values)
        logits, codes = (
            [x[name] for x in (output, later)] for name in ("logits", "uncertainty_codes")
        )
        yield logits, codes, model.prismlm_uncertainty.weight.grad.clone()


STEPS = dict.fromkeys(("cosine", "fitted"), head_step) | dict.fromkeys(BLOCKS, blocks_step)
STEPS |= {"feedback": feedback_step}


@pytest.mark.parametrize(
    ("backend", "cases"),
    [
        ("aot_eager", ("cosine", "fitted")),
        pytest.param("inductor", ("cosine", "fitted"), marks=pytest.mark.slow),
        pytest.param("aot_eager", tuple(BLOCKS), marks=pytest.mark.slow),
        pytest.param("eager", ("feedback",), marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_equal_eager_ones(backend, cases):
    done = forked.run_script(Path(__file__), backend, *cases)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{case}: equal" for case in cases]


if __name__ == "__main__":
    for name in sys.argv[2:]:
        eager, compiled = STEPS[name](name, sys.argv[1])
        bounds = {"rtol": 1e-4, "atol": 1e-6} if name in BLOCKS else {}
        torch.testing.assert_close(compiled, eager, **bounds)
        sys.stdout.write(f"{name}: equal\n")
