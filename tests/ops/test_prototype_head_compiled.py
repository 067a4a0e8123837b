"""torch.compile around the prototype head; run as a script, too."""

import sys
from pathlib import Path

import pytest
import torch

from prismlm.layers import PrototypeHead
from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head import fitted
from tests.helpers import forked


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_step_is_one_graph_and_equals_eager(backend):
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = forked.run_script(Path(__file__), backend)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cosine equal", "fitted equal"]


def main(weights: str, backend: str) -> None:
    """Compare losses and gradients of a training step with those of its one compiled graph."""
    # Two passes of a pursuit, as with more prototypes; the graph repeats each of their rounds.
    ops.PICKS = fitted.PICKS = 4
    fitted.ROUNDS = 8
    generator = torch.Generator().manual_seed(0)
    head = PrototypeHead(24, 70, 6, scale=1.5, weights=weights)  # pyright: ignore[reportArgumentType]
    head.reset_parameters(generator)
    inputs = torch.randn(2, 10, 24, generator=generator)
    mask = torch.rand(2, 10, generator=generator) < 0.8

    def step(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = torch.tanh(z)
        output = head(states, mask=mask)
        losses = head.losses(states, output, mask=mask)
        return (*output.routing, output.reconstruction, *losses)

    results: list[list[torch.Tensor]] = []
    for form in (step, torch.compile(step, backend=backend, fullgraph=True)):
        z = inputs.clone().requires_grad_()
        head.zero_grad()
        found = form(z)
        torch.stack(found[-4:]).sum().backward()
        grads = [x.grad for x in (z, *head.parameters())]
        results.append([*found, *(grad.clone() for grad in grads if grad is not None)])
    assert len(results[0]) == len(results[1]) == 14
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    sys.stdout.write(f"{weights} equal\n")


if __name__ == "__main__":
    for name in ("cosine", "fitted"):
        main(name, sys.argv[1])
