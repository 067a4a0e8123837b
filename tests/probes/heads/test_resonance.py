"""Cross terms by hand, by plain sums and over heads, and what other ratios would give."""

import math

import pytest
import torch

from prismlm.ops.signal_noise_attention import group_frequencies
from prismlm.probes.heads import own_cross_terms
from prismlm.probes.heads.resonance import (
    ORDER,
    RATIOS,
    content_amplitudes,
    cross_terms,
    denominator,
    position_term,
)
from prismlm.probes.heads.states import read_states
from tests.helpers.cross_terms import cross_term
from tests.helpers.head_models import make_batch, make_signal_noise, random_rows


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
    assert denominator(torch.tensor([1.0]), torch.tensor([3.0]), 4) == 0
    value = denominator(torch.tensor([1.0, 10.0]), torch.tensor([math.pi]), 22)
    # 22 − 7π = 0.0089 would be the least but for 10 n.
    least = min(
        abs(a * w - b * math.pi) for w in (1, 10) for a in range(1, 23) for b in range(1, 23)
    )
    assert value == pytest.approx(least, abs=1e-6)


ONE = torch.ones(1, dtype=torch.float64)
ROWS = random_rows(30, 18, 25)


def states_of(**settings):
    return read_states(make_signal_noise(**settings), [make_batch(*ROWS)])


def test_terms_are_means_over_pairs_of_heads():
    states = states_of()
    own = cross_terms(states, length=50).rows[0]
    assert own_cross_terms(states, length=50).items() <= own.items()
    assert (own["ratio"], own["value"], own["scaling"]) == ("own", math.pi, "base")
    for one, terms in zip(states, own["layers"], strict=True):
        amplitudes = content_amplitudes(one.projections())
        signal, noise = amplitudes[:4], amplitudes[4:]
        first, second = one.attention.signal_frequencies, one.attention.noise_frequencies

        def mean(a, b, u, v):
            return cross_term(a, b, position_term(u, v, 50)).mean().item()

        k_sn = mean(signal, noise, first, second)
        k_ss = mean(signal, signal, first, first)
        k_nn = mean(noise, noise, second, second)
        found = [terms[name] for name in ("signal_noise", "signal_signal", "noise_noise")]
        assert found == pytest.approx([k_sn, k_ss, k_nn])
        assert terms["normalised"] == pytest.approx(k_sn / math.sqrt(k_ss * k_nn))
        assert 0 < terms["normalised"] <= 1
    assert own["normalised"] == pytest.approx(sum(t["normalised"] for t in own["layers"]) / 2)
    assert own["signal_noise"] == pytest.approx(sum(t["signal_noise"] for t in own["layers"]) / 2)


def test_one_row_for_each_ratio_and_scaling():
    table = cross_terms(states_of(), length=50)
    found = table.rows
    names = [(one["ratio"], one["scaling"]) for one in found]
    assert names == [("own", "base"), *((r, s) for s in ("base", "angle") for r in RATIOS)]
    own, pi = found[0], found[1]
    assert pi["layers"] == own["layers"]
    for one in found:
        if one["ratio"] == "1":
            # The same rotations: of frequencies alone the groups are one.
            assert one["position"]["normalised"] == pytest.approx(1)
            assert one["denominator"] == 0
        assert one["position"]["normalised"] <= 1 + 1e-12
    # Scaling of the base leaves the first pair at 1 radian a position in both groups.
    assert [one["denominator"] for one in found[:7]] == [0] * 7
    assert None not in [one["later_denominator"] for one in found[:7]]
    # The second of two pairs: ω_S = 1/√20000, ω_N = 1/√5000, twice as much: n = 2, m = 1.
    assert table.row(ratio="2", scaling="base")["later_denominator"] == 0
    # ω_S = 3 and 0.03, ω_N = 1/3 and 1/300: each nine times the other, beyond an order of 8.
    assert table.row(ratio="3", scaling="angle")["denominator"] == 0
    below = cross_terms(states_of(), length=50, order=8).row(ratio="3", scaling="angle")
    assert below["denominator"] == pytest.approx(0.03 - 8 / 300, abs=1e-12)
    least = min(found[1:], key=lambda one: one["normalised"])
    assert f"{least['ratio']} of the {least['scaling']}" in table["least_in_step"]


def test_exact_resonances_are_not_rounding():
    def later(ratio, scaling):
        exact = group_frequencies(20, 10_000.0, ratio, scaling, dtype=torch.float64)
        return denominator(*(group[1:] for group in exact), ORDER)

    # 20 dimensions scale 30000 and 10000/3 to −2j/20; at j = 5 one is 9^(−1/2) of the other.
    assert later(3.0, "base") == 0
    # What is near is not called exact.
    assert later(math.pi, "base") > 0
    assert later(math.pi, "angle") > 0
    # 22/7 against 1, within the order.
    assert denominator(torch.tensor([22 / 7], dtype=torch.float64), ONE, ORDER) == 0


def test_heads_of_one_pair_have_no_later_one():
    found = cross_terms(states_of(head_size=2), length=50).rows
    assert all(one["later_denominator"] is None for one in found)
