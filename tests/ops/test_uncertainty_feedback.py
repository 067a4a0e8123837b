"""Normalised entropies, their codes and vectors: by hand and against the equations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prismlm.errors import InputError
from prismlm.ops.uncertainty_feedback import (
    NO_CODE,
    embed_codes,
    entropy_codes,
    naive,
    neutral_code,
    normalised_entropy,
    quantise,
)
from prismlm.ops.uncertainty_feedback import codes as module


def test_entropies_by_hand():
    logits = torch.tensor([[0.0, 0, 0, 0], [0, 0, -math.inf, -math.inf], [90, 0, 0, 0]])
    # Uniform over four; ln 2 / ln 4; certain.
    assert normalised_entropy(logits).tolist() == pytest.approx([1, 0.5, 0], abs=1e-6)
    # ¾ and ¼: (¾ ln 4/3 + ¼ ln 4) / ln 2 = 0.811278.
    uneven = torch.tensor([[math.log(3), 0.0]])
    assert normalised_entropy(uneven).item() == pytest.approx(0.8112781, rel=1e-6)


@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    scale=st.floats(0.01, 60),
    tile=st.sampled_from([1, 25, module.ELEMENTS]),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_equation(rows, vocabulary, scale, tile, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, 2, vocabulary, generator=generator)
    expected = naive.normalised_entropy(logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ELEMENTS", tile)
        entropy, exact = normalised_entropy(logits), normalised_entropy(logits.double())
    assert entropy.dtype == torch.float32
    assert torch.equal(entropy, normalised_entropy(logits))
    torch.testing.assert_close(entropy.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(exact, expected, rtol=1e-10, atol=1e-12)
    # A constant added to all logits changes nothing.
    shifted = normalised_entropy(logits.double() + 1000)
    torch.testing.assert_close(shifted, expected, rtol=1e-7, atol=1e-9)


def test_bf16_is_summed_in_float32_without_changing_the_input():
    logits = torch.randn(4, 50_000, dtype=torch.bfloat16, requires_grad=True)
    before = logits.detach().clone()
    entropy = normalised_entropy(logits)
    torch.testing.assert_close(
        entropy.double(), naive.normalised_entropy(before), rtol=1e-5, atol=0
    )
    assert torch.equal(logits, before)
    assert not entropy.requires_grad


def test_memory_is_below_a_copy_of_the_logits():
    logits = torch.randn(64, 100_000)
    assert logits.numel() > 6 * module.ELEMENTS
    with torch.profiler.profile(profile_memory=True) as profile:
        normalised_entropy(logits)
    largest = max(event.self_cpu_memory_usage for event in profile.key_averages())
    each = max(event.cpu_memory_usage // max(event.count, 1) for event in profile.key_averages())
    assert min(largest, each) < logits.nbytes / 4


def test_codes_are_rounded_down():
    shares = torch.tensor([0.0, 0.4999, 0.5, 0.99999, 1.0])
    assert quantise(shares, 3).tolist() == [0, 0, 1, 1, 2]
    assert quantise(torch.tensor([0.0, 0.5, 1.0]), 65536).tolist() == [0, 32767, 65535]
    assert neutral_code(65536) == 32768
    assert neutral_code(3) == 1


def test_codes_of_predictions_by_hand():
    uneven = torch.tensor([math.log(3), 0.0])
    # 0.811278 of 1,000 and of 4.
    assert entropy_codes(uneven, 1001).item() == 811
    assert entropy_codes(torch.stack([uneven, torch.zeros(2)]), 5).tolist() == [3, 4]
    assert entropy_codes(torch.stack([uneven * 90, torch.zeros(2)]), 65536).tolist() == [0, 65535]
    # ln 2 of ln 4.
    assert entropy_codes(torch.tensor([[0.0, -math.inf, -math.inf, 0.0]]), 1000).item() == 499


def test_vectors_by_hand():
    table = torch.tensor([[0.0, 1], [4, 5], [8, 1]])
    codes = torch.tensor([0, 1, 2, 3, 4, NO_CODE])
    # Five levels over three rows: codes 1 and 3 lie half-way.
    expected = [[0, 1], [2, 3], [4, 5], [6, 3], [8, 1], [0, 0]]
    assert embed_codes(codes, table, 5).tolist() == expected
    assert embed_codes(torch.tensor([2, 0, NO_CODE]), table, 3).tolist() == [[8, 1], [0, 1], [0, 0]]


@given(st.integers(2, 70), st.data())
def test_vectors_and_gradients_equal_the_naive_interpolation(levels, data):
    rows = data.draw(st.integers(2, levels))
    codes = torch.tensor(data.draw(st.lists(st.integers(-1, levels - 1), min_size=1, max_size=6)))
    table = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(codes), 3, dtype=torch.float64)
    results = []
    for form in (embed_codes, naive.embed_codes):
        out = form(codes, table, levels)
        loss = (out * weights).sum() + 0 * table.sum()  # in case no code has a vector
        results.append((out, *torch.autograd.grad(loss, table)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_neighbouring_codes_of_16_bits_differ():
    table = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    vectors = embed_codes(torch.arange(65536), table, 65536)[:, 0]
    torch.testing.assert_close(vectors, torch.arange(65536, dtype=torch.float64) / 65535)
    for dtype in (torch.float16, torch.bfloat16):
        half = embed_codes(torch.arange(65536), table.to(dtype), 65536)[:, 0].double()
        torch.testing.assert_close(half, vectors, atol=0.01, rtol=0)


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_wrong_input(row):
    with pytest.raises(InputError, match=r"NaN or \+∞, or only −∞"):
        entropy_codes(torch.tensor([[0.0, 1.0], row]), 4)
