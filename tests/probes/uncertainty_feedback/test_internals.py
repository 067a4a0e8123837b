"""Attention received by code, and the code in hidden states."""

import numpy as np
import pytest
import torch

from prismlm.probes.uncertainty_feedback import Signal
from prismlm.probes.uncertainty_feedback.internals import (
    attention_probe,
    code_probe,
    matched_ranks,
    received_attention,
    ridge,
    strongest_layer,
)
from prismlm.probes.uncertainty_feedback.signal import neutral_codes, own_codes
from prismlm.statistics import Interval, spearman
from tests.helpers.feedback_models import (
    LEVELS,
    inputs_of,
    make_fed_gpt2,
    make_fed_protot,
    random_texts,
    set_table,
)


@torch.no_grad()
def test_attention_received_is_the_mean_over_later_tokens():
    model, _ = make_fed_gpt2()
    texts = random_texts(6, 6)
    codes = own_codes(model, texts, Signal())
    result = received_attention(model, texts, codes)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    for number, text in enumerate(texts):
        output = model(
            text[None],
            uncertainty_codes=codes[number][None],
            output_attentions=True,
            use_cache=False,
        )
        for layer, weights in enumerate(output.attentions):
            expected = [
                sum(float(weights[0, :, i, j].mean()) for i in range(j + 1, 6)) / (5 - j)
                for j in range(5)
            ]
            np.testing.assert_allclose(result[layer, number], [*expected, 0], atol=1e-6)


def test_texts_are_cut_to_one_length_and_compared_with_nothing_fed():
    model, feedback = make_fed_gpt2()
    texts = random_texts(30, 24, 40, 24, 26, 12, 24, 28)
    codes = own_codes(model, texts, Signal())
    result = attention_probe(inputs_of(model, texts, codes), permutations=49)
    # The lower of the middle two of 12, 24, 24, 24, 26, 28, 30, 40.
    assert (result["length"], result["texts"], result["left_out"]) == (24, 7, 1)
    assert result["positions"] == 24 - 1 - 8
    assert len(result.rows) == 2
    for row in result.rows:
        assert -1 <= row["correlation"] <= 1
        assert 1 / 50 <= row["p"] <= row["q"] <= 1
        assert row["added"].value == pytest.approx(row["correlation"] - row["without"])
    # Texts too short by themselves change nothing, however many they are.
    several = [*texts, *random_texts(*[5] * 20)]
    mixed = attention_probe(inputs_of(model, several), permutations=49)
    assert (mixed["length"], mixed["texts"], mixed["left_out"]) == (24, 7, 21)
    assert mixed.rows == result.rows
    # Cut off is as never read.
    cut = [text[:24] for text in texts if len(text) >= 24]
    cut_codes = tuple(row[:24] for row in codes if len(row) >= 24)
    alike = attention_probe(inputs_of(model, cut, cut_codes), permutations=49)
    assert alike.rows == result.rows
    # With a table of zeros, nothing fed is the same.
    set_table(feedback, torch.zeros(1, 16))
    for row in attention_probe(inputs_of(model, texts, codes), permutations=49).rows:
        assert row["correlation"] == row["without"]
        assert (row["added"].low, row["added"].high) == (0, 0)


def test_codes_that_draw_attention_are_found():
    """A table whose vector is what every query looks for."""
    model, feedback = make_fed_gpt2(layers=1)
    with torch.no_grad():
        block = model.transformer.h[0]
        # Keys are the first coordinate, and every query is 1.
        block.attn.c_attn.weight.zero_()
        block.attn.c_attn.bias.zero_()
        block.attn.c_attn.bias[:16] = 1.0
        block.attn.c_attn.weight[0, 16:32] = 0.5
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight[:, 0] = 0
    table = torch.zeros(LEVELS, 16)
    table[:, 0] = torch.linspace(-3, 3, LEVELS)
    set_table(feedback, table)
    texts = random_texts(*[24] * 12)
    generator = torch.Generator().manual_seed(0)
    codes = tuple(torch.randint(0, LEVELS, (24,), generator=generator) for _ in texts)
    for row in codes:
        row[0] = -1
    result = attention_probe(inputs_of(model, texts, codes))
    (layer,) = result.rows
    assert layer["correlation"] > 0.8
    assert layer["p"] == layer["q"] == 1 / 1000
    assert abs(layer["without"]) < 0.3
    assert layer["added"].above_zero
    assert result.findings[0]["effect"] == "above 0"
    # Turned round, low codes draw it.
    set_table(feedback, table.flip(0))
    turned = attention_probe(inputs_of(model, texts, codes))
    assert turned.rows[0]["correlation"] < -0.8
    assert turned.findings[0]["effect"] == "may be chance"


def test_the_layer_that_is_named_is_one_that_is_counted():
    def rows(*added):
        figures = zip([(0, 1), (0, 1), (0.5, 0.2), (0.2, 0.01)], added, strict=True)
        return [
            {"layer": n, "correlation": rho, "q": q, "without": 0, "added": more}
            for n, ((rho, q), more) in enumerate(figures)
        ]

    unclear, more = Interval(0.0, -0.1, 0.1), Interval(0.2, 0.1, 0.3)
    result = strongest_layer(rows(more, more, more, unclear), 9)
    assert result["finding"].startswith("attention: ρ with the code in layer 3,")
    assert (result["value"], result["effect"]) == (unclear, "may be chance")
    assert strongest_layer(rows(unclear, unclear, unclear, more), 9)["effect"] == "above 0"
    # None is counted: the largest correlation, which is not clear.
    none = strongest_layer(rows(more, more, more, more)[:3], 9)
    assert "layer 2," in none["finding"]
    assert none["effect"] == "may be chance"
    # Codes that are all the same are no negative finding.
    same = strongest_layer(rows(more, more, more, more), 1)
    assert (same["value"], same["effect"]) == (None, "undefined")


def test_ranks_within_positions_by_hand():
    x, y = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [30.0], [20.0]])
    result = matched_ranks(x, y)
    # Of the six orders, 1, ½, ½, −½, −½, −1: all are as large as ½.
    assert result.correlation == pytest.approx(0.5)
    assert result.p == 1
    assert result.by_text.mean() == pytest.approx(result.correlation)
    # (−1, 0, 1) and (−1, 1, 0): products 1, 0, 0, over a norm of 2.
    np.testing.assert_allclose(result.by_text, [1.5, 0, 0])
    # Two positions that go opposite ways cancel.
    assert matched_ranks(np.hstack([x, x]), np.hstack([y, -y])).correlation == pytest.approx(0)


def test_what_the_position_alone_makes_is_not_found_within_positions():
    rng = np.random.default_rng(0)
    place = np.tile(np.arange(20.0), (12, 1))
    codes = place + rng.random((12, 20))
    exact = matched_ranks(codes, place)
    assert (exact.correlation, exact.p) == (0.0, 1.0)
    noisy = place + rng.random((12, 20))
    assert spearman(codes.ravel(), noisy.ravel()).rho > 0.9
    assert matched_ranks(codes, noisy).p > 0.1
    # What a text makes on top is found.
    real = matched_ranks(codes, codes + place + 0.1 * rng.random((12, 20)))
    assert real.correlation > 0.9
    assert real.p == 1 / 1000


def test_null_of_rows_keeps_what_goes_together_along_a_text():
    """A text-wide shift of x and of y, independent of one another, must not be found too often."""
    rng = np.random.default_rng(1)
    result = []
    for seed in range(40):
        x, y = (rng.normal(size=(8, 1)) + 0.1 * rng.normal(size=(8, 30)) for _ in range(2))
        result.append(matched_ranks(x, y, permutations=199, seed=seed).p)
    assert np.mean(np.array(result) <= 0.05) <= 0.15


@pytest.mark.parametrize("make", [make_fed_gpt2, make_fed_protot])
def test_a_code_that_is_fed_can_be_read_and_a_shuffled_one_cannot(make):
    model, feedback = make()
    texts = random_texts(*[40] * 30)
    table = torch.zeros(LEVELS, 16)
    table[:, 3] = torch.linspace(-20, 20, LEVELS)
    set_table(feedback, table)
    generator = torch.Generator().manual_seed(0)
    codes = tuple(torch.randint(0, LEVELS, (40,), generator=generator) for _ in texts)
    for row in codes:
        row[0] = -1
    result = code_probe(inputs_of(model, texts, codes))
    assert (result["fitted_on"], result["tested_on"], result["positions"]) == (20, 10, 20 * 39)
    assert [row["layer"] for row in result.rows] == [0, 1, 2]
    assert [row["depth"] for row in result.rows] == [0, 0.5, 1]
    first = result.rows[0]
    assert first["code"].low > 0.95
    assert abs(first["shuffled"].value) < 0.1
    assert abs(first["without"].value) < 0.1
    assert first["added"].low > 0.9
    (best,) = result.findings
    assert (best["value"], best["effect"]) == (first["added"], "above 0")
    # What nothing is fed of, the fed states do not have.
    set_table(feedback, torch.zeros(1, 16))
    nothing = code_probe(inputs_of(model, texts, codes))
    for row in nothing.rows:
        assert row["code"] == row["without"]
        assert (row["added"].low, row["added"].high) == (0, 0)
    assert nothing.findings[0]["effect"] == "may be chance"


def test_codes_that_are_all_the_same_are_no_negative_finding():
    model, _ = make_fed_gpt2()
    texts = random_texts(*[24] * 8)
    (result,) = code_probe(inputs_of(model, texts, neutral_codes(texts, LEVELS))).findings
    assert (result["value"], result["effect"]) == (None, "undefined")


def test_ridge_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    y = x[:, :1] + torch.randn(8, 1, generator=generator, dtype=torch.float64)
    rows = torch.cat([torch.ones(8, 1, dtype=torch.float64), x, y], 1)
    result, bias = ridge(rows.T @ rows, targets=1)
    inner = (x - x.mean(0)) / x.std(0, correction=0)
    scores = {}
    for power in range(-6, 3):
        matrix = inner.T @ inner / 8 + 10.0**power * torch.eye(20, dtype=torch.float64)
        weight = torch.linalg.solve(matrix, inner.T @ (y - y.mean()) / 8)
        hat = inner @ torch.linalg.solve(matrix, inner.T) / 8
        error = ((y - y.mean() - inner @ weight) ** 2).mean()
        freedom = 1 - (hat.trace() + 1) / 8
        if freedom >= 0.1:
            scores[float(error / freedom**2)] = weight
    best = scores[min(scores)]
    torch.testing.assert_close(result, best / x.std(0, correction=0)[:, None])
    torch.testing.assert_close((x @ result + bias).mean(), y.mean())
