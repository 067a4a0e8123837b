"""Signal/noise attention: by hand, and against the equation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.ops.signal_noise_attention import frequencies, fused, group_frequencies, naive, rotate

FORMS = [naive, fused]
BASE = 10_000.0


def inputs(b, h, s, p, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(2, b, h, s, p, generator=generator, dtype=torch.float64).to(dtype)
    return u[0], u[1], {"frequencies": group_frequencies(p, BASE, math.pi)}


def test_frequencies_by_hand():
    torch.testing.assert_close(frequencies(4, 100.0), torch.tensor([1.0, 0.1]))
    torch.testing.assert_close(frequencies(4, 100.0, angle=3.0), torch.tensor([3.0, 0.3]))
    turned = rotate(
        torch.tensor([[1.0, 0.0, 0.0, 2.0]]), torch.tensor([2]), torch.tensor([math.pi / 4, 0.0])
    )
    # Pair 0 is (1, 0), turned by a right angle; pair 1 is (0, 2), which stays.
    torch.testing.assert_close(turned, torch.tensor([[0.0, 0.0, 1.0, 2.0]]))


def test_frequencies_of_the_groups_by_hand():
    by_base, by_angle = (group_frequencies(4, 100.0, 4.0, way) for way in ("base", "angle"))
    torch.testing.assert_close(by_base, torch.tensor([[1.0, 0.05], [1.0, 0.2]]))
    torch.testing.assert_close(by_angle, torch.tensor([[4.0, 0.4], [0.25, 0.025]]))


@pytest.mark.parametrize("form", FORMS)
def test_hand_computed(form):
    # One head of each kind, two positions; the signal's pair turns by π at position 1.
    u = torch.tensor([[[[1.0, 0.0], [1.0, 1.0]]]])
    out = form.attend(
        u, 2 * u, 0.25, frequencies=torch.tensor([[math.pi], [2 * math.pi]]), scale=1.0
    )
    # Signal: scores of position 1 are (1,1)·R_-π(1,0) = −1 and 2; values (1,0) and (1,1).
    own = math.exp(2) / (math.exp(2) + math.exp(-1))
    # Noise, unturned: scores (2,2)·(2,0) = 4 and 8; times −1/4.
    other = math.exp(8) / (math.exp(8) + math.exp(4))
    expected = [[[1.0, 0.0], [1.0, own]], [[-0.5, 0.0], [-0.5, -0.5 * other]]]
    torch.testing.assert_close(out[0], torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(
    b=st.integers(1, 2),
    h=st.integers(1, 3),
    s=st.integers(1, 9),
    half=st.integers(1, 3),
    queries=st.integers(1, 9),
    weight=st.floats(0, 1),
    masked=st.booleans(),
    seed=st.integers(0, 50),
)
def test_fused_equals_the_equation(b, h, s, half, queries, weight, masked, seed):
    u_signal, u_noise, more = inputs(b, h, s, 2 * half, seed)
    more["queries"] = min(queries, s)
    if masked:
        generator = torch.Generator().manual_seed(seed)
        more["mask"] = torch.rand(b, 1, more["queries"], s, generator=generator) < 0.5
        more["mask"][..., 0] = True
        more["positions"] = torch.randint(0, 40, (b, s), generator=generator)
    leaves = [u_signal.requires_grad_(), u_noise.requires_grad_()]
    lam = torch.tensor(weight, dtype=torch.float64, requires_grad=True)
    slow, fast = (form.attend(*leaves, lam, **more) for form in (naive, fused))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)
    g = torch.randn(slow.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad((out * g).sum(), [*leaves, lam]) for out in (fast, slow))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


def test_float32_is_near_float64_and_a_shift_of_all_positions_changes_nothing():
    u_signal, u_noise, more = inputs(2, 4, 65, 16)
    exact = fused.attend(u_signal, u_noise, 0.1, **more)
    out = fused.attend(u_signal.float(), u_noise.float(), 0.1, **more)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    positions = torch.arange(65).expand(2, -1) + 31
    there = fused.attend(u_signal, u_noise, 0.1, positions=positions, **more)
    torch.testing.assert_close(there, exact)
