"""An adapter in the weights: by hand, in either layout of a weight, and what does not fit."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from prismlm.errors import FormatError, InputError
from prismlm.models.base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, find_base, merge_adapter
from prismlm.models.checkpoint import read_checkpoint


class Conv1D(nn.Module):
    """GPT-2's: its weight is [in, out]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))


def model():
    made = nn.Module()
    made.inner = nn.Module()
    made.inner.linear = nn.Linear(3, 2, bias=False)
    made.inner.turned = Conv1D()
    made.inner.linear.weight.data.fill_(1.0)
    return made


def write(directory, tensors, **config):
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"r": 1, "lora_alpha": 2} | config))


def factors(name):
    prefix = f"base_model.model.inner.{name}"
    return {
        f"{prefix}.lora_A.weight": torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16),
        f"{prefix}.lora_B.weight": torch.tensor([[0.5], [-1.0]], dtype=torch.bfloat16),
    }


def test_by_hand(tmp_path):
    made = model()
    write(tmp_path, factors("linear") | factors("turned"))
    merge_adapter(made, tmp_path)
    # 2 · [0.5, −1]ᵀ [1, 2, 3]
    added = torch.tensor([[1.0, 2.0, 3.0], [-2.0, -4.0, -6.0]])
    assert torch.equal(made.inner.linear.weight, 1 + added)
    assert torch.equal(made.inner.turned.weight, added.T)


def test_it_is_rounded_once(tmp_path):
    generator = torch.Generator().manual_seed(0)
    made = nn.Module()
    made.linear = nn.Linear(64, 48, bias=False)
    before = made.linear.weight.detach().clone()
    down, up = (torch.randn(s, generator=generator).bfloat16() for s in ((8, 64), (48, 8)))
    prefix = "base_model.model.linear"
    write(tmp_path, {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}, r=8)
    merge_adapter(made, tmp_path)
    # Summed in the other order: the same bits, since every sum is exact.
    exact = sum(up[:, i, None].double() * down[None, i].double() for i in reversed(range(8)))
    assert torch.equal(made.linear.weight, (before.double() + exact * 2 / 8).float())


@pytest.mark.parametrize("name", ["elsewhere", "turned2"])
def test_of_another_model(tmp_path, name):
    write(tmp_path, factors(name))
    with pytest.raises(FormatError, match="of another model"):
        merge_adapter(model(), tmp_path)


@pytest.mark.parametrize("damage", ["no tensors", "half a pair", "no rank", "an endless factor"])
def test_damaged(tmp_path, damage):
    tensors = factors("linear")
    config = {"no rank": {"r": 0}, "an endless factor": {"lora_alpha": 10**400}}.get(damage, {})
    if damage == "half a pair":
        tensors.popitem()
    write(tmp_path, tensors, **config)
    if damage == "no tensors":
        (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(FormatError, match="damaged"):
        merge_adapter(model(), tmp_path)


def test_an_adapter_without_its_model_is_named_with_the_way_out(tmp_path):
    write(tmp_path, factors("linear"), base_model_name_or_path="some/base")
    for opens in (lambda: find_base(str(tmp_path)), lambda: read_checkpoint(tmp_path)):
        with pytest.raises(InputError, match=r"(?s)PEFT adapter of some/base, .*merge_and_unload"):
            opens()
