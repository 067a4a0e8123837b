"""Position terms, cross terms and small denominators, by hand and by plain sums."""

import math

import pytest
import torch

from prismlm.instruments.heads.resonance import (
    content_amplitudes,
    position_term,
    smallest_denominator,
)
from tests.helpers.cross_terms import cross_term


@pytest.mark.parametrize("length", [1, 2, 17, 512])
def test_the_closed_form_is_the_mean(length):
    first = torch.tensor([0.0, 1e-4, 0.3, 1.0, math.pi])
    second = torch.tensor([0.0, 0.3, 2.0, 1.0, 2 * math.pi, math.pi])
    tau = torch.arange(length, dtype=torch.float64)
    expected = torch.einsum(
        "mt,nt->mn",
        torch.cos(first.double()[:, None] * tau),
        torch.cos(second.double()[:, None] * tau),
    )
    torch.testing.assert_close(
        position_term(first, second, length), expected / length, rtol=1e-6, atol=1e-7
    )


def test_the_cross_term_is_its_double_sum():
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 2, 9, 4, generator=generator, dtype=torch.float64)
    first, second = content_amplitudes(u), content_amplitudes(v)
    assert first[0, 0, 0].item() == pytest.approx(math.hypot(u[0, 0, 0], u[0, 0, 2]))
    position = position_term(torch.tensor([1.0, 0.1]), torch.tensor([0.5, 0.2]), 20)
    found = cross_term(first, second, position)
    for g in range(2):
        for f in range(2):
            total = 0.0
            for j in range(2):
                for k in range(2):
                    # E over two independent positions of C_uj C_vk.
                    content = sum(
                        first[g, a, j] * first[g, b, j] * second[f, a, k] * second[f, b, k]
                        for a in range(9)
                        for b in range(9)
                    )
                    total += content / 81 * position[j, k]
            assert found[g, f].item() == pytest.approx(float(total))


def test_small_denominators():
    # 3 · 1 − 1 · 3 = 0 with n = 3, m = 1.
    assert smallest_denominator(torch.tensor([1.0]), torch.tensor([3.0]), 4) == (0.0, 3, 1)
    value, n, m = smallest_denominator(torch.tensor([1.0, 10.0]), torch.tensor([math.pi]), 22)
    # 22 − 7π = 0.0089 would be the least but for 10 n.
    least = min(
        abs(a * w - b * math.pi) for w in (1, 10) for a in range(1, 23) for b in range(1, 23)
    )
    assert value == pytest.approx(least, abs=1e-6)
    assert min(abs(n * w - m * math.pi) for w in (1, 10)) == pytest.approx(value, abs=1e-6)
