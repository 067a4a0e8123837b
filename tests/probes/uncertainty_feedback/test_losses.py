"""The loss with other codes, and predictions after a planted mistake."""

import numpy as np
import pytest
import torch

from prismlm.probes.uncertainty_feedback import Signal
from prismlm.probes.uncertainty_feedback.losses import (
    ablation,
    excess_loss,
    mistakes,
    plant_mistake,
    recovery_table,
)
from prismlm.probes.uncertainty_feedback.signal import Replay, own_codes, permuted
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

TEXTS = random_texts(12, 7, 12, 9, 12)


@torch.no_grad()
def test_ablation_is_the_loss_with_other_codes():
    model, feedback = make_fed_gpt2()
    set_table(feedback, 3 * torch.randn(LEVELS, 16, generator=torch.Generator().manual_seed(0)))
    codes = own_codes(model, TEXTS, Signal())
    found = ablation(reading_of(model, TEXTS, codes, permutations=3, seed=5))
    assert found["tokens"] == sum(map(len, TEXTS)) - len(TEXTS)
    assert found["texts"] == len(TEXTS)

    def loss(given):
        total = torch.zeros(())
        for text, own in zip(TEXTS, given, strict=True):
            logits = model(text[None], uncertainty_codes=own[None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits[:-1], text[1:], reduction="sum"
            )
        return float(total) / found["tokens"]

    zero, neutral = ([torch.full_like(own, code) for own in codes] for code in (-1, LEVELS // 2))
    for row in neutral:
        row[0] = -1
    own, *others = found.rows
    for row, given in zip(found.rows, (codes, zero, neutral), strict=False):
        assert row["loss"] == pytest.approx(loss(given), rel=1e-5)
    change = others[2]["change"]
    draws = [loss(permuted(codes, seed)) - own["loss"] for seed in (5, 6, 7)]
    assert change.value == pytest.approx(sum(draws) / 3, abs=1e-4)
    assert change.low < change.value < change.high
    # Beside what comes of no vector at all, which a model may merely expect.
    (said,) = found.findings
    assert (said["value"], said["control"]) == (change, others[0]["change"].value)


@torch.no_grad()
def test_a_model_that_goes_by_its_codes_is_found_out():
    """Blocks that add nothing, so that the next token is the one that the code's vector names."""
    model, feedback = make_fed_gpt2()
    silence_blocks(model)
    model.transformer.wte.weight.normal_(generator=torch.Generator().manual_seed(0))
    table = 30 * torch.randn(LEVELS, 16, generator=torch.Generator().manual_seed(1))
    set_table(feedback, table)
    named = (model.transformer.ln_f(table) @ model.transformer.wte.weight.T).argmax(-1)
    generator = torch.Generator().manual_seed(2)
    codes = tuple(torch.randint(0, LEVELS, (20,), generator=generator) for _ in range(8))
    texts = [torch.cat([torch.tensor([1]), named[row[:-1]]]) for row in codes]
    for row in codes:
        row[0] = -1
    found = ablation(reading_of(model, texts, codes))
    for row in found.rows[1:]:
        assert row["change"].above_zero
    assert found.findings[0]["effect"] == "above 0"
    # Fed the wrong way round, shuffled codes are the better ones.
    other = permuted(codes, 9)
    turned = ablation(reading_of(model, texts, other)).row(signal="neutral")
    assert turned["change"].value < found.row(signal="neutral")["change"].low


def test_equal_rows_leave_nothing_to_shuffle_and_a_table_of_zeros_nothing_at_all():
    model, feedback = make_fed_gpt2()
    set_table(feedback, torch.randn(1, 16, generator=torch.Generator().manual_seed(0)))
    codes = own_codes(model, TEXTS, Signal())
    found = ablation(reading_of(model, TEXTS, codes))
    _, zero, neutral, shuffled = found.rows
    assert neutral["change"].value == shuffled["change"].value == shuffled["change"].high == 0
    assert zero["change"].value != 0
    assert found.findings[0]["effect"] == "may be chance"
    set_table(feedback, torch.zeros(1, 16))
    for row in ablation(reading_of(model, TEXTS, codes)).rows[1:]:
        assert row["change"] == Interval(0, 0, 0)
    one_pass = own_codes(model, TEXTS, Signal("passes", 1))
    assert ablation(reading_of(model, TEXTS, one_pass)).findings[0]["effect"] == "undefined"


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
    assert [one["effect"] for one in found.findings] == ["below 0"] * 2
    # The prediction that has just read the wrong token cannot know, the one after it does.
    own, _, shuffled = (row["loss"] for row in found.rows)
    assert own[0] == pytest.approx(shuffled[0], abs=0.2)
    assert own[1] < shuffled[1] - 0.2
    # Where the high code blurs, the mistake costs more.
    set_table(feedback, torch.where(high, 3 * blur, 0 * blur))
    codes = own_codes(model, texts, Signal())
    turned = mistakes(reading_of(model, texts, codes, seed=1))
    assert turned.findings[0]["effect"] == "above 0"


def test_the_loss_after_a_mistake_is_that_of_the_tokens_after_it():
    """Tokens 0 to 5, of which 2 is wrong: its own loss, at 1, is no matter."""
    intact = Replay(torch.zeros(5).double(), torch.zeros(6))
    wrong = Replay(torch.tensor([0.0, 9.0, 1.0, 2.0, 4.0]).double(), torch.zeros(6))
    # Predictions at 2, 3 and 4, of tokens 3, 4 and 5.
    assert excess_loss([wrong], [intact], [2], 3).tolist() == [[1.0, 2.0, 4.0]]
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
    assert (found["texts"], found["draws"]) == (4, 2)
    own, *others = found.rows
    for row in found.rows:
        assert row["summed_loss"].value == pytest.approx(sum(row["loss"]))
    for row in others:
        assert row["own_loss_less"].value == pytest.approx(sum(own["loss"]) - sum(row["loss"]))
    assert len({tuple(row["loss"]) for row in found.rows}) == 3
    set_table(feedback, torch.zeros(1, 16))
    same = mistakes(reading_of(model, texts, codes, mistakes=2, seed=1))
    assert same.rows[1]["own_loss_less"].value == same.rows[2]["own_loss_less"].high == 0
    assert [one["effect"] for one in same.findings] == ["may be chance"] * 2
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
        torch.tensor(only.rows[1]["loss"]), losses[0] - losses[1], atol=1e-4, rtol=1e-4
    )


def test_recovery_is_the_first_step_back():
    found = np.zeros((3, 2, 4))
    # Two texts; means 2, 0.05, 1, 0.
    found[0] = [[3, 0.1, 2, 0], [1, 0.0, 0, 0]]
    found[1] = 1
    result = recovery_table(found, 1, 0, 30)
    assert [row["recovered_after"] for row in result.rows] == [2, None, 1]
    assert result.rows[1]["own_loss_less"].value == pytest.approx(3.05 - 4)
    assert "over 4 tokens" in result.title
    assert [one["value"] for one in result.findings] == [
        row["own_loss_less"] for row in result.rows[1:]
    ]
    # Codes that are all the same are no negative finding.
    same = recovery_table(found, 1, 0, 1)
    assert [one["effect"] for one in same.findings] == ["undefined"] * 2


@pytest.mark.parametrize(
    ("losses", "effects"),
    [
        ((1, 2, 2), ["below 0", "below 0"]),
        ((1, 2, 1), ["below 0", "may be chance"]),
        ((1, 1, 2), ["may be chance", "below 0"]),
        ((2, 1, 1), ["above 0", "above 0"]),
    ],
)
def test_a_mistake_is_compared_with_both_controls(losses, effects):
    found = np.zeros((3, 9, 2)) + np.array(losses)[:, None, None]
    assert [one["effect"] for one in recovery_table(found, 4, 0, 30).findings] == effects
