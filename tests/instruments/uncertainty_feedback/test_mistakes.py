"""Predictions after a planted mistake."""

import numpy as np
import pytest
import torch

from prismlm.errors import InputError
from prismlm.instruments.uncertainty_feedback import Mistakes, Signal
from prismlm.instruments.uncertainty_feedback.mistakes import (
    AfterMistake,
    excess,
    mistakes,
    plant_mistake,
)
from prismlm.instruments.uncertainty_feedback.signal import Replay, own_codes
from prismlm.statistics import Interval
from tests.helpers.feedback_models import (
    LEVELS,
    directions,
    make_fed_gpt2,
    make_tokenizer,
    random_texts,
    reading_of,
    set_table,
    silence_blocks,
)


@torch.no_grad()
def test_a_model_that_collects_itself_when_it_is_told_to_is_found_out():
    """Tokens 1 to 12 follow one another; after any other the model knows nothing.

    The high code that this makes leaves the next prediction clear, and low ones blur it.
    """
    model, feedback = make_fed_gpt2(tied=False)
    silence_blocks(model)
    blur, *follows = directions(13)
    words, head = model.transformer.wte.weight, model.lm_head.weight
    words.zero_()
    head.zero_()
    for number, direction in enumerate(follows):
        words[1 + number] = 4 * direction
        head[1 + (number + 1) % 12] = direction
    high = torch.arange(LEVELS)[:, None] > 0.9 * LEVELS
    table = torch.where(high, 0 * blur, 3 * blur)
    set_table(feedback, table)
    texts = [1 + (torch.arange(24) + begun) % 12 for begun in range(12)]
    codes = own_codes(model, texts, Signal())
    found = mistakes(reading_of(model, texts, codes, seed=1))
    assert found.loss_against_zero.below_zero
    assert found.loss_against_shuffled.below_zero
    assert found.verdict.startswith("With its signal a mistake costs it less")
    # The prediction that has just read the wrong token cannot know, the one after it does.
    own, _, shuffled = found.signals
    assert own.loss[0] == pytest.approx(shuffled.loss[0], abs=0.2)
    assert own.loss[1] < shuffled.loss[1] - 0.2
    # Where the high code blurs, the mistake costs more.
    set_table(feedback, torch.where(high, 3 * blur, 0 * blur))
    codes = own_codes(model, texts, Signal())
    turned = mistakes(reading_of(model, texts, codes, seed=1))
    assert turned.loss_against_zero.low > 0
    assert "does not beat both controls" in turned.verdict


def test_the_loss_after_a_mistake_is_that_of_the_tokens_after_it():
    """Tokens 0 to 5, of which 2 is wrong: its own loss, at 1, is no matter."""
    intact = Replay(torch.zeros(5).double(), torch.zeros(6))
    wrong = Replay(
        torch.tensor([0.0, 9.0, 1.0, 2.0, 4.0]).double(),
        torch.tensor([0.0, 0.0, 0.5, 0.25, 0.125, 1.0]),
    )
    found = excess([wrong], [intact], [2], 3)
    # Predictions at 2, 3 and 4, of tokens 3, 4 and 5.
    assert found.tolist() == [[[0.5, 0.25, 0.125]], [[1.0, 2.0, 4.0]]]
    rng = np.random.default_rng(0)
    text = torch.arange(6)
    for _ in range(20):
        other = plant_mistake(text, 3, np.array([2, 3, 4]), rng)
        assert (other != text).nonzero().tolist() == [[3]]
        assert int(other[3]) in (2, 4)


@torch.no_grad()
def test_mistakes_with_each_signal():
    model, feedback = make_fed_gpt2()
    set_table(feedback, 2 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))
    texts = random_texts(20, 14, 9, 20, 11)
    codes, special = own_codes(model, texts, Signal()), make_tokenizer(eos_token="w0")
    found = mistakes(reading_of(model, texts, codes, special, mistakes=2, seed=1))
    # One text is too short.
    assert (found.texts, found.draws) == (4, 2)
    own, zero, shuffled = found.signals
    for one in found.signals:
        assert one.summed_loss.value == pytest.approx(sum(one.loss))
        assert one.mean_entropy.value == pytest.approx(sum(one.entropy) / 8)
    assert found.loss_against_zero.value == pytest.approx(sum(own.loss) - sum(zero.loss))
    assert found.loss_against_shuffled.value == pytest.approx(sum(own.loss) - sum(shuffled.loss))
    assert found.entropy_against_zero.value == pytest.approx(
        own.mean_entropy.value - zero.mean_entropy.value
    )
    assert len({own.loss, zero.loss, shuffled.loss}) == 3
    set_table(feedback, torch.zeros(1, 16))
    same = mistakes(reading_of(model, texts, codes, mistakes=2, seed=1))
    assert same.loss_against_zero.value == same.loss_against_shuffled.high == 0
    assert "does not beat both controls" in same.verdict
    # It reads on after the mistake: by hand, of the one text that is as long as it must be.
    text = random_texts(10)
    only = mistakes(reading_of(model, text, mistakes=1, seed=4))
    rng = np.random.default_rng(4)
    place = int(rng.integers(1, 2))
    wrong = plant_mistake(text[0], place, np.arange(37), rng)
    none = torch.full((1, 10), -1)
    losses = [
        torch.nn.functional.cross_entropy(
            model(row[None], uncertainty_codes=none, use_cache=False).logits[0, 1:9],
            row[2:],
            reduction="none",
        )
        for row in (wrong, text[0])
    ]
    torch.testing.assert_close(
        torch.tensor(only.signals[1].loss), losses[0] - losses[1], atol=1e-4, rtol=1e-4
    )


def test_recovery_is_the_first_step_back():
    from prismlm.instruments.uncertainty_feedback.mistakes import _result

    found = np.zeros((3, 2, 2, 4))
    # Two texts; means 2, 0.05, 1, 0.
    found[0, 1] = [[3, 0.1, 2, 0], [1, 0.0, 0, 0]]
    found[1, 1] = 1
    result = _result(found, 1, 0, 30)
    assert [one.recovered_after for one in result.signals] == [2, None, 1]
    assert result.loss_against_zero.value == pytest.approx(3.05 - 4)


def test_texts_that_hold_no_mistake_are_refused():
    model, _ = make_fed_gpt2()
    texts = random_texts(5, 9)
    with pytest.raises(InputError, match="no text has 10 tokens"):
        mistakes(reading_of(model, texts))


NONE, MORE, LESS = Interval(0.0, -0.1, 0.1), Interval(0.2, 0.1, 0.3), Interval(-0.2, -0.3, -0.1)


@pytest.mark.parametrize(
    ("zero", "shuffled", "helps"),
    [(LESS, LESS, True), (LESS, NONE, False), (NONE, LESS, False), (MORE, MORE, False)],
)
def test_mistakes_must_beat_both_controls(zero, shuffled, helps):
    one = AfterMistake("own", (0.1, 0.0), (0.5, 0.2), NONE, MORE, None)
    verdict = Mistakes(9, 4, 0.1, (one,), zero, shuffled, NONE, NONE, 30).verdict
    assert verdict.startswith("With its signal a mistake costs it less") == helps
    assert "over 2 tokens" in verdict


def test_a_mistake_that_costs_less_by_chance_is_not_said_to_cost_no_less():
    one = AfterMistake("own", (0.1, 0.0), (0.5, 0.2), NONE, MORE, None)
    unclear = Interval(-0.05, -0.2, 0.1)
    verdict = Mistakes(9, 4, 0.1, (one,), LESS, unclear, NONE, NONE, 30).verdict
    assert verdict.startswith("With its signal a mistake cost it less than with either control, b")
