"""The code in hidden states."""

import pytest
import torch

from prismlm.probes.uncertainty_feedback.probes import Moments, best_layer, code_probe
from prismlm.probes.uncertainty_feedback.signal import neutral_codes
from prismlm.statistics import Interval
from tests.helpers.feedback_models import (
    LEVELS,
    make_fed_gpt2,
    make_fed_protot,
    random_texts,
    reading_of,
    set_table,
)


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
    found = code_probe(reading_of(model, texts, codes))
    assert (found["fitted_on"], found["tested_on"], found["positions"]) == (20, 10, 20 * 39)
    assert [row["layer"] for row in found.rows] == [0, 1, 2]
    assert [row["depth"] for row in found.rows] == [0, 0.5, 1]
    first = found.rows[0]
    assert first["code"].low > 0.95
    assert abs(first["shuffled"].value) < 0.1
    assert abs(first["without"].value) < 0.1
    assert first["added"].low > 0.9
    (best,) = found.findings
    assert (best["value"], best["effect"]) == (first["added"], "above 0")
    # What nothing is fed of, the fed states do not have.
    set_table(feedback, torch.zeros(1, 16))
    nothing = code_probe(reading_of(model, texts, codes))
    for row in nothing.rows:
        assert row["code"] == row["without"]
        assert (row["added"].low, row["added"].high) == (0, 0)
    assert nothing.findings[0]["effect"] == "may be chance"


def test_the_layer_that_is_named_is_one_the_code_is_read_from():
    def layer(number, code, shuffled=0.0):
        return {"layer": number, "code": code, "shuffled": Interval(shuffled, -0.1, 0.1)}

    nan = float("nan")
    nothing, wide = layer(0, Interval(0.0, -0.05, 0.05)), layer(1, Interval(0.224, -0.1, 0.4))
    # What stands above its control is named, and is not clear.
    assert best_layer([nothing, wide]) == (wide, False)
    # The best of those that are clear of it is named.
    read = layer(0, Interval(0.2, 0.15, 0.25))
    assert best_layer([read, wide]) == (read, True)
    # What is undefined is never the best.
    undefined = layer(0, Interval(nan, nan, nan), nan)
    assert best_layer([undefined, read]) == (read, True)
    assert best_layer([undefined, nothing]) == (nothing, False)


def test_codes_that_are_all_the_same_are_no_negative_finding():
    model, _ = make_fed_gpt2()
    texts = random_texts(*[24] * 8)
    (found,) = code_probe(reading_of(model, texts, neutral_codes(texts, LEVELS))).findings
    assert (found["value"], found["effect"]) == (None, "undefined")


def test_ridge_is_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    y = x[:, :1] + torch.randn(8, 1, generator=generator, dtype=torch.float64)
    moments = Moments(20, 1)
    moments.add(x, y)
    found, bias = moments.fit()
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
    torch.testing.assert_close(found, best / x.std(0, correction=0)[:, None])
    torch.testing.assert_close((x @ found + bias).mean(), y.mean())
