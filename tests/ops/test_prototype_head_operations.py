"""Operations of a training step, counted on ``meta``: looking at a number is an error there."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prismlm.layers import PrototypeHead
from prismlm.ops.prototype_mixer import prefix_mean


class Operations(TorchDispatchMode):
    """Counts what a device would be asked to do, without views and memory."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or name.startswith("empty") or name == "_unsafe_view")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def without_autocast(monkeypatch):
    """There is none for the device."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())


def mixer_step(length):
    with torch.device("meta"):
        leaves = [torch.empty(2, length, size, requires_grad=True) for size in (32, 32, 128)]
        leaves.append(torch.empty(32, requires_grad=True))
        with Operations() as step:
            out, _ = prefix_mean(*leaves)
            torch.autograd.grad(out, leaves, torch.empty_like(out))
    return step.count


def head_step(states):
    with torch.device("meta"):
        head = PrototypeHead(64, 4096, 16)
        z = torch.empty(states, 64, requires_grad=True)
        with Operations() as step:
            torch.stack(list(head.losses(z, head(z)))).sum().backward()
    return step.count


def test_a_step_of_the_mixer_is_as_many_operations_at_every_length():
    counts = {mixer_step(length) for length in (256, 4096)}
    assert len(counts) == 1
    assert counts.pop() <= 140


def test_a_step_of_the_head_is_few_operations():
    assert head_step(8192) <= 126
