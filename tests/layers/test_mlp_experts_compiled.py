"""torch.compile around a mixture of experts; as a script it is the compiled process itself."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from prismlm.layers.mlp import Experts
from prismlm.models.presets import build_config, build_model

SIZES = {"preset": "signal-noise-tiny", "hidden_size": 24, "head_size": 6}
EXPERTS = {"mlp": "experts", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.slow
def test_one_graph_equals_eager_and_adapters_still_count():
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "layer equal\nbf16 equal\nblocks equal\nhooked equal\n"


def values(layer, x):
    layer.zero_grad()
    output = layer(x).output
    output.float().square().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in layer.parameters())]


def compare(bias, precision):
    torch.manual_seed(0)
    layer = Experts(12, 20, 5, 2, bias=bias)
    # Tokens go elsewhere each time, and some experts have none: nothing is compiled again.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    seen, before = torch._dynamo.utils.counters["stats"], 0
    for seed in range(3):
        x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(seed)) * 10**seed
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            torch.testing.assert_close(values(compiled, x), values(layer, x), rtol=1e-4, atol=1e-6)
        graphs = seen["unique_graphs"]
        assert seed == 0 or graphs == before, "compiled again"
        before = graphs


def run(model):
    ids = torch.randint(100, (2, 12), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def main() -> None:
    """Compare outputs and gradients; a break of the graph is an error."""
    for bias in (False, True):
        compare(bias, "float32")
    sys.stdout.write("layer equal\n")
    compare(True, "bf16")
    sys.stdout.write("bf16 equal\n")
    torch.manual_seed(0)
    model = build_model(build_config(SIZES | EXPERTS, 100, 0))
    eager = run(model)
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(model), eager, rtol=1e-4, atol=1e-6)
    sys.stdout.write("blocks equal\n")
    # What stands in an expert's place is called, at the price of a break.
    layer, x = Experts(12, 20, 3, 2), torch.randn(6, 12)
    down = layer.experts[0].down_proj
    layer.experts[0].down_proj = nn.Sequential(down, nn.Linear(12, 12))
    found = torch.compile(layer, backend="aot_eager")(x).output
    torch.testing.assert_close(found, layer(x).output)
    layer.experts[0].down_proj = down
    plain = layer(x).output
    layer.experts[1].register_forward_hook(lambda module, args, output: output * 0)
    found = torch.compile(layer, backend="aot_eager")(x).output
    torch.testing.assert_close(found, layer(x).output)
    assert not torch.allclose(found, plain)
    sys.stdout.write("hooked equal\n")


if __name__ == "__main__":
    main()
