"""torch.compile around the prototype head; run as a script it is the compiled process itself."""

import sys
from pathlib import Path

import pytest
import torch

from prismlm.ops import prototype_head as ops
from prismlm.ops.prototype_head import naive
from tests.helpers import forked


def test_a_compiled_step_equals_eager():
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = forked.run_script(Path(__file__))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


class Routed(torch.nn.Module):
    def forward(self, z, prototypes, mask):
        return ops.route(z, prototypes, 3, 1.5, mask)


@pytest.mark.parametrize("kept", [0, 7, 20])
def test_what_is_exported_routes_as_the_equation(kept):
    generator = torch.Generator().manual_seed(0)
    z, other, prototypes = (torch.randn(n, 8, generator=generator) for n in (20, 20, 30))
    mask = torch.arange(20) < kept
    program = torch.export.export(Routed(), (other, prototypes, ~mask), strict=False)
    found, expected = (
        program.module()(z, prototypes, mask),
        naive.route(z, prototypes, 3, 1.5, mask),
    )
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right)


def step(z, prototypes, scale):
    states = torch.tanh(z)
    routing = ops.route(states, prototypes, 3, scale)
    rebuilt = ops.reconstruct(routing, prototypes)
    loss = ops.residual(states, rebuilt) + ops.prototype_pull(routing)
    return routing, loss + ops.point_pull(routing) + ops.diversity(prototypes)


def leaves():
    generator = torch.Generator().manual_seed(0)
    z, prototypes = (torch.randn(n, 8, generator=generator) for n in (20, 30))
    return z.requires_grad_(), prototypes.requires_grad_(), torch.tensor(1.5, requires_grad=True)


def main() -> None:
    """Compare outputs and gradients of the step with those of its one compiled graph."""
    results = []
    for form in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        given = leaves()
        routing, loss = form(*given)
        loss.backward()
        results.append((*routing, loss, *(leaf.grad for leaf in given)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main()
