"""Blocks of our decoders compiled, each one graph; run as a script, too."""

import sys
from pathlib import Path

import pytest
import torch

from prismlm.models.presets import build_config, build_model
from tests.helpers import forked

SIZES = {"hidden_size": 32, "dropout": 0.0, "num_hidden_layers": 2}
COMPILED = {
    "protot": {"preset": "protot-tiny"},
    "deltanet": {"model_type": "prismlm_deltanet"},
    "signal/noise": {"preset": "signal-noise-tiny", "head_size": 8},
}


@pytest.mark.slow
def test_compiled_blocks_have_the_logits_and_gradients_of_eager_ones():
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = forked.run_script(Path(__file__))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{case}: equal" for case in COMPILED]


def compare_compiled(settings):
    torch.manual_seed(0)
    model = build_model(build_config(settings | SIZES, 100, 0))
    ids = torch.randint(100, (2, 40), generator=torch.Generator().manual_seed(1))
    position_ids = torch.cat([torch.arange(15), torch.arange(25)]).expand(2, -1)
    results = []
    for _ in range(2):
        model.zero_grad()
        output = model(ids, position_ids=position_ids, labels=ids, use_cache=False)
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append((output.logits.detach(), gradients))
        for block in model.model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    for case, model_settings in COMPILED.items():
        compare_compiled(model_settings)
        sys.stdout.write(f"{case}: equal\n")
