"""The code in hidden states."""

import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback import CodeProbe
from prismlm.instruments.uncertainty_feedback.probe import LayerProbe, code_probe
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
    assert (found.fitted_on, found.tested_on, found.positions) == (20, 10, 20 * 39)
    assert [one.layer for one in found.layers] == [0, 1, 2]
    assert [one.depth for one in found.layers] == [0, 0.5, 1]
    first = found.layers[0]
    assert first.code.low > 0.95
    assert abs(first.shuffled.value) < 0.1
    assert abs(first.without.value) < 0.1
    assert first.added.low > 0.9
    assert found.peak is first
    assert found.verdict.startswith("The code is read best at depth 0.00 (layer 0 of 2; about 0.67")
    # What nothing is fed of, the fed states do not have.
    set_table(feedback, torch.zeros(1, 16))
    nothing = code_probe(reading_of(model, texts, codes))
    for one in nothing.layers:
        assert one.code == one.without
        assert (one.added.low, one.added.high) == (0, 0)
    assert nothing.verdict.startswith("No layer lets the code be read")


@torch.no_grad()
def test_the_next_entropy_is_that_of_the_prediction_at_the_position():
    model, _ = make_fed_gpt2()
    texts = random_texts(*[24] * 30)
    found = code_probe(reading_of(model, texts))
    # The last state gives the logits, so it tells of their entropy more than the first does.
    assert found.layers[-1].next_entropy.value > found.layers[0].next_entropy.value
    with pytest.raises(InputError, match="at least 4"):
        code_probe(reading_of(model, texts[:3]))


NONE, MORE = Interval(0.0, -0.1, 0.1), Interval(0.2, 0.1, 0.3)


def test_a_probe_that_is_unclear_is_said_to_be():
    def layer(number, code, added):
        found = Interval(code, code - 0.05, code + 0.05)
        return LayerProbe(number, number / 3, found, NONE, NONE, added, NONE)

    def verdict(*layers):
        return CodeProbe(8, 4, 500, 2 / 3, layers, 9).verdict

    # What stands above its control in the table is never said to be no better.
    wide = LayerProbe(1, 1.0, Interval(0.224, -0.1, 0.4), Interval(-0.002, -0.1, 0.1), *[NONE] * 3)
    unclear = verdict(layer(0, 0.0, NONE), wide)
    assert "No layer" not in unclear
    # The best of those that are clear of it is named.
    assert verdict(layer(0, 0.2, MORE), wide).startswith("The code is clearly read at depth 0.00")
    # Nor is the text said to tell it as well where that is read worse from it.
    assert "may be chance" in verdict(layer(0, 0.3, Interval(0.1, -0.1, 0.3)))
