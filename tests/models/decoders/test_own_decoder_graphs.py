"""Our decoders compiled, and exported with a symbolic length and batch size; also a script."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from prismlm.models.presets import build_config, build_model
from tests.helpers import forked

V = 50
PROTOT = {"model_type": "prismlm_protot", "num_channels": 6, "num_hidden_layers": 1}
UNSHARED = PROTOT | {"shared_gate_layers": []}
BY_TOKEN = PROTOT | {"num_groups": 2, "decay_mode": "token", "decay_half_lives": [0.1, 64.0]}
SIGNAL_NOISE = {"model_type": "prismlm_signal_noise", "head_size": 6, "num_hidden_layers": 1}
EXPORTED = {
    "protot": (UNSHARED, False),
    "protot, padded": (PROTOT, True),
    "protot, by token": (BY_TOKEN, False),
    "signal/noise": (SIGNAL_NOISE, False),
    "signal/noise, padded": (SIGNAL_NOISE, True),
}
COMPILED = {
    "protot": {"preset": "protot-tiny"},
    "deltanet": {"model_type": "prismlm_deltanet", "num_hidden_layers": 2},
    "signal/noise": {"preset": "signal-noise-tiny", "head_size": 8},
}


@pytest.mark.parametrize("how", ["exported", pytest.param("compiled", marks=pytest.mark.slow)])
def test_graphs_compute_the_same(how):
    # A process of its own: the run-time type checks of the test run cannot be traced.
    done = forked.run_script(Path(__file__), how)
    assert done.returncode == 0, done.stderr
    cases = EXPORTED if how == "exported" else COMPILED
    assert done.stdout.splitlines() == [f"{case}: equal" for case in cases]


class Logits(nn.Module):
    """A model's logits, 0 on padding."""

    def __init__(self, settings):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 24, "initializer_range": 0.3}
        self.model = build_model(build_config(settings | sizes, V, 0)).eval()

    def forward(self, ids, mask=None):
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits if mask is None else logits * mask[..., None]


def inputs(rows, length, padded):
    ids = torch.randint(V, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, : length // 3] = 0
    return (ids, mask) if padded else (ids,)


@torch.no_grad()
def compare_exported(settings, padded):
    """Export with one shape, and compare with the model in others."""
    model, args = Logits(settings), inputs(2, 40, padded)
    shape = {0: Dim("rows", max=64), 1: Dim("length", min=2, max=4096)}
    program = export(model, args, dynamic_shapes=(shape,) * len(args), strict=False).module()
    for rows, length in ((2, 40), (3, 64), (1, 7), (2, 131)):
        args = inputs(rows, length, padded)
        torch.testing.assert_close(program(*args), model(*args), rtol=1e-4, atol=2e-5)


def compare_compiled(**settings):
    """Compare logits and gradients of compiled blocks, each one graph, with those of eager ones."""
    torch.manual_seed(0)
    model = build_model(build_config(settings | {"hidden_size": 32, "dropout": 0.0}, 100, 0))
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
    if sys.argv[1] == "exported":
        for case, (model_settings, is_padded) in EXPORTED.items():
            compare_exported(model_settings, is_padded)
            sys.stdout.write(f"{case}: equal\n")
    else:
        for case, model_settings in COMPILED.items():
            compare_compiled(**model_settings)
            sys.stdout.write(f"{case}: equal\n")
