"""torch.compile around signal/noise attention; as a script it is the compiled process itself."""

import subprocess
import sys

import pytest
import torch

from prismlm.ops.signal_noise_attention import attend, group_frequencies


@pytest.mark.slow
def test_one_graph_for_any_length_equals_eager():
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one graph, equal\n"


def main() -> None:
    """Compare outputs and gradients; a break of the graph is an error."""
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    signal, noise = group_frequencies(4, 10_000.0, 3.0)
    rotations = {"signal_frequencies": signal, "noise_frequencies": noise}
    for length in (6, 9):
        for queries in (length, length - 2, 1):
            u = torch.randn(2, 1, 2, length, 4, requires_grad=True)
            weight = torch.tensor(0.3, requires_grad=True)
            found: list[tuple[torch.Tensor, ...]] = []
            for form in (attend, compiled):
                out = form(u[0], u[1], weight, queries=queries, **rotations)
                found.append((out, *torch.autograd.grad(out.square().sum(), (u, weight))))
            for eager, own in zip(*found, strict=True):
                torch.testing.assert_close(own, eager)
    sys.stdout.write("one graph, equal\n")


if __name__ == "__main__":
    main()
