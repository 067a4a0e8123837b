"""Our decoders exported with a symbolic length and batch size; also a script."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, export

from prismlm.models.presets import build_config, build_model
from tests.helpers import forked

VOCABULARY = 50
PROTOT = {"model_type": "prismlm_protot", "num_channels": 6, "num_hidden_layers": 2}
BY_TOKEN = {
    "num_groups": 2,
    "num_hidden_layers": 1,
    "decay_mode": "token",
    "decay_half_lives": [0.1, 64.0],
}
SIGNAL_NOISE = {"model_type": "prismlm_signal_noise", "head_size": 6, "num_hidden_layers": 2}
CASES = {
    "protot": (PROTOT, False),
    "protot, padded": (PROTOT, True),
    "protot, by token": (PROTOT | BY_TOKEN, False),
    "signal/noise": (SIGNAL_NOISE, False),
    "signal/noise, padded": (SIGNAL_NOISE, True),
}


def test_exported_programs_of_any_length_equal_the_models():
    # In a separate process: the run-time type checks of the test run cannot be traced.
    done = forked.run_script(Path(__file__))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{case}: equal" for case in CASES]


class Logits(nn.Module):
    """A model's logits, 0 on padding."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask=None):
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits if mask is None else logits * mask[..., None]


def inputs(rows, length, padded):
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, : length // 3] = 0
    return (ids, mask) if padded else (ids,)


@torch.no_grad()
def compare(case):
    """Export with one shape, and compare with the model in others."""
    settings, padded = CASES[case]
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "initializer_range": 0.3}
    model = Logits(build_model(build_config(settings | sizes, VOCABULARY, 0)).eval())
    shape = {0: Dim("rows", max=64), 1: Dim("length", min=2, max=4096)}
    args = inputs(2, 40, padded)
    program = export(model, args, dynamic_shapes=(shape,) * len(args), strict=False).module()
    for rows, length in ((2, 40), (3, 64), (1, 7), (2, 131)):
        args = inputs(rows, length, padded)
        torch.testing.assert_close(program(*args), model(*args), rtol=1e-4, atol=2e-5)
    sys.stdout.write(f"{case}: equal\n")


if __name__ == "__main__":
    for case in CASES:
        compare(case)
