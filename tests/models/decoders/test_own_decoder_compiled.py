"""Compiled blocks of our decoders; run as a script, this is the compiled process itself."""

import subprocess
import sys

import pytest
import torch

from prismlm.models.presets import build_config, build_model

FAMILIES = {
    "protot": {"preset": "protot-tiny", "dropout": 0.0},
    "deltanet": {"model_type": "prismlm_deltanet", "num_hidden_layers": 2, "dropout": 0.0},
    "signal/noise": {"preset": "signal-noise-tiny", "head_size": 8},
}


@pytest.mark.slow
def test_compiled_blocks_compute_the_same():
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} equal" for name in FAMILIES]


def run(model):
    ids = torch.randint(100, (2, 40), generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    model.zero_grad()
    output = model(ids, position_ids=position_ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def main() -> None:
    """Compare compiled blocks with eager ones, each of them one graph."""
    for name, settings in FAMILIES.items():
        torch.manual_seed(0)
        model = build_model(build_config(settings | {"hidden_size": 32}, 100, 0))
        eager = run(model)
        for block in model.model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(model), eager, rtol=1e-4, atol=1e-6)
        sys.stdout.write(f"{name} equal\n")


if __name__ == "__main__":
    main()
