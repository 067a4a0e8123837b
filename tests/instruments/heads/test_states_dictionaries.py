"""Coding rates and incoherence, by hand and against determinants."""

import math

import pytest
import torch

from prismlm.instruments.heads.states import coding_rate, incoherence, subspace_rate


def direct(z, distortion):
    count, width = z.shape
    inner = torch.eye(count, dtype=z.dtype) + width / (count * distortion**2) * z @ z.T
    return torch.linalg.slogdet(inner).logabsdet / 2


def test_hand_computed():
    # One point of norm 5 in two dimensions: ½ log(1 + 2 · 25 / 0.25).
    point = torch.tensor([[3.0, 4.0]])
    assert coding_rate(point).item() == pytest.approx(math.log(201) / 2)
    assert coding_rate(point, distortion=5.0).item() == pytest.approx(math.log(3) / 2)
    # Two orthogonal points: two directions of ½ log(1 + 2/2 · 4 / 1) each.
    points = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert coding_rate(points, distortion=1.0).item() == pytest.approx(math.log(5))


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (40, 5), (5, 5)])
def test_both_grams_give_the_determinant(shape):
    z = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(coding_rate(z, distortion=0.3), direct(z, 0.3))


def test_a_dictionarys_rate_is_the_sum_over_its_heads():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(30, 8, generator=generator, dtype=torch.float64)
    u = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64)
    expected = sum(direct(z @ u[h], 0.5) for h in range(3))
    torch.testing.assert_close(subspace_rate(z, u), expected)


def test_incoherence():
    eye = torch.eye(6)
    assert incoherence(eye[:, :2], eye[:, 2:]).item() == 0
    assert incoherence(eye[:, :1], 3 * eye[:, :1]).item() == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100, 400, generator=generator)
    assert incoherence(a, b).item() == pytest.approx(0.1, rel=0.05)
