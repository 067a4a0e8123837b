"""Attention received by code, and the code in hidden states."""

import numpy as np
import pytest
import torch

from prismlm.probes.uncertainty_feedback import internals
from prismlm.probes.uncertainty_feedback.signal import own_codes
from prismlm.statistics import Interval, spearman
from tests.helpers import small_models as fed


@torch.no_grad()
def test_attention_received_is_the_mean_over_later_tokens():
    model, _ = fed.make_fed_gpt2()
    texts = fed.random_texts(6, 6)
    codes = own_codes(model, texts, 2)
    result = internals.received_attention(model, texts, codes)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    for number, text in enumerate(texts):
        how = {"uncertainty_codes": codes[number][None], "output_attentions": True}
        for layer, weights in enumerate(model(text[None], **how, use_cache=False).attentions):
            expected = [
                sum(float(weights[0, :, i, j].mean()) for i in range(j + 1, 6)) / (5 - j)
                for j in range(5)
            ]
            np.testing.assert_allclose(result[layer, number], [*expected, 0], atol=1e-6)


def test_texts_are_cut_to_one_length_and_compared_with_nothing_fed():
    model, feedback = fed.make_fed_gpt2()
    texts = fed.random_texts(30, 24, 40, 24, 26, 12, 24, 28)
    codes = own_codes(model, texts, 2)
    result = internals.attention_probe(fed.inputs_of(model, texts, codes), permutations=49)
    # The lower of the middle two of 12, 24, 24, 24, 26, 28, 30, 40.
    assert (result["length"], result["texts"], result["left_out"]) == (24, 7, 1)
    assert result["positions"] == 24 - 1 - 8
    assert len(result.rows) == 2
    for row in result.rows:
        assert -1 <= row["correlation"] <= 1
        assert 1 / 50 <= row["p"] <= row["q"] <= 1
        assert row["added"].value == pytest.approx(row["correlation"] - row["without"])
    # Texts too short by themselves change nothing, however many they are.
    several = [*texts, *fed.random_texts(*[5] * 20)]
    mixed = internals.attention_probe(fed.inputs_of(model, several), permutations=49)
    assert (mixed["length"], mixed["texts"], mixed["left_out"]) == (24, 7, 21)
    assert mixed.rows == result.rows
    # With a table of zeros, nothing fed is the same.
    fed.set_table(feedback, torch.zeros(1, 16))
    for row in internals.attention_probe(fed.inputs_of(model, texts, codes), permutations=49).rows:
        assert row["correlation"] == row["without"]
        assert (row["added"].low, row["added"].high) == (0, 0)


def test_codes_that_attract_attention():
    """A table whose vector is what every query looks for."""
    model, feedback = fed.make_fed_gpt2(layers=1)
    with torch.no_grad():
        block = model.transformer.h[0]
        # Keys are the first coordinate, and every query is 1.
        block.attn.c_attn.weight.zero_()
        block.attn.c_attn.bias.zero_()
        block.attn.c_attn.bias[:16] = 1.0
        block.attn.c_attn.weight[0, 16:32] = 0.5
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight[:, 0] = 0
    vectors = torch.zeros(fed.LEVELS, 16)
    vectors[:, 0] = torch.linspace(-3, 3, fed.LEVELS)
    fed.set_table(feedback, vectors)
    texts = fed.random_texts(*[24] * 12)
    codes = fed.random_codes(map(len, texts))
    table = internals.attention_probe(fed.inputs_of(model, texts, codes))
    (layer,) = table.rows
    assert layer["correlation"] > 0.8
    assert layer["p"] == layer["q"] == 1 / 1000
    assert abs(layer["without"]) < 0.3
    assert layer["added"].above_zero
    assert table.findings[0]["effect"] == "above 0"


def test_the_finding_is_of_a_layer_that_counts():
    def finding(*added, codes=9):
        figures = zip([(0, 1), (0, 1), (0.5, 0.2), (0.2, 0.01)], added, strict=False)
        rows = [
            {"layer": layer, "correlation": rho, "q": q, "without": 0, "added": interval}
            for layer, ((rho, q), interval) in enumerate(figures)
        ]
        return internals.strongest_layer(rows, codes)

    unclear, more = Interval(0.0, -0.1, 0.1), Interval(0.2, 0.1, 0.3)
    row = finding(more, more, more, unclear)
    assert row["finding"].startswith("attention: ρ with the code in layer 3,")
    assert (row["value"], row["effect"]) == (unclear, "may be chance")
    assert finding(unclear, unclear, unclear, more)["effect"] == "above 0"
    # Without a layer that counts, the one with the largest correlation, which is not clear.
    row = finding(more, more, more)
    assert "layer 2," in row["finding"]
    assert row["effect"] == "may be chance"
    # Codes that are all the same are no negative finding.
    row = finding(more, more, more, more, codes=1)
    assert (row["value"], row["effect"]) == (None, "undefined")


def test_ranks_within_positions_by_hand():
    x, y = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [30.0], [20.0]])
    result = internals.matched_ranks(x, y)
    # Of the six orders, 1, ½, ½, −½, −½, −1: all are as large as ½.
    assert result.correlation == pytest.approx(0.5)
    assert result.p == 1
    assert result.by_text.mean() == pytest.approx(result.correlation)
    # (−1, 0, 1) and (−1, 1, 0): products 1, 0, 0, over a norm of 2.
    np.testing.assert_allclose(result.by_text, [1.5, 0, 0])
    # Two positions that go opposite ways cancel.
    opposite = internals.matched_ranks(np.hstack([x, x]), np.hstack([y, -y]))
    assert opposite.correlation == pytest.approx(0)


def test_what_depends_on_the_position_alone_does_not_correlate_within_positions():
    rng = np.random.default_rng(0)
    positions = np.tile(np.arange(20.0), (12, 1))
    codes = positions + rng.random((12, 20))
    exact = internals.matched_ranks(codes, positions)
    assert (exact.correlation, exact.p) == (0.0, 1.0)
    noisy = positions + rng.random((12, 20))
    assert spearman(codes.ravel(), noisy.ravel())[0] > 0.9
    assert internals.matched_ranks(codes, noisy).p > 0.1
    real = internals.matched_ranks(codes, codes + positions + 0.1 * rng.random((12, 20)))
    assert real.correlation > 0.9
    assert real.p == 1 / 1000


def test_a_code_that_is_fed_can_be_read_and_a_shuffled_one_cannot():
    model, feedback = fed.make_fed_gpt2()
    texts = fed.random_texts(*[40] * 30)
    vectors = torch.zeros(fed.LEVELS, 16)
    vectors[:, 3] = torch.linspace(-20, 20, fed.LEVELS)
    fed.set_table(feedback, vectors)
    codes = fed.random_codes(map(len, texts))
    table = internals.code_probe(fed.inputs_of(model, texts, codes))
    assert (table["fitted_on"], table["tested_on"], table["positions"]) == (20, 10, 20 * 39)
    assert [row["layer"] for row in table.rows] == [0, 1, 2]
    first = table.rows[0]
    assert first["code"].low > 0.95
    assert abs(first["shuffled"].value) < 0.1
    assert abs(first["without"].value) < 0.1
    assert first["added"].low > 0.9
    (finding,) = table.findings
    assert (finding["value"], finding["effect"]) == (first["added"], "above 0")
    # With a table of zeros, states are as if nothing was fed.
    fed.set_table(feedback, torch.zeros(1, 16))
    table = internals.code_probe(fed.inputs_of(model, texts, codes))
    for row in table.rows:
        assert row["code"] == row["without"]
        assert (row["added"].low, row["added"].high) == (0, 0)
    assert table.findings[0]["effect"] == "may be chance"
    # Codes that are all the same are no negative finding.
    (result,) = internals.code_probe(fed.inputs_of(model, texts, passes=1)).findings
    assert (result["value"], result["effect"]) == (None, "undefined")


def test_ridge_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(8, 21, generator=generator, dtype=torch.float64).split([20, 1], 1)
    y = x[:, :1] + noise
    rows = torch.cat([torch.ones_like(y), x, y], 1)
    weight, bias = internals.ridge(rows.T @ rows, targets=1)
    inputs, target = (x - x.mean(0)) / x.std(0, correction=0), y - y.mean()
    by_error = {}
    for power in range(-6, 3):
        matrix = inputs.T @ inputs / 8 + 10.0**power * torch.eye(20, dtype=torch.float64)
        solved = torch.linalg.solve(matrix, inputs.T) / 8
        freedom = 1 - ((inputs @ solved).trace() + 1) / 8
        if freedom >= 0.1:
            error = (target - inputs @ solved @ target).square().mean()
            by_error[float(error / freedom**2)] = solved @ target
    expected = by_error[min(by_error)] / x.std(0, correction=0)[:, None]
    torch.testing.assert_close(weight, expected)
    torch.testing.assert_close((x @ weight + bias).mean(), y.mean())
