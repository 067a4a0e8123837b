"""The loss with other codes, and what is said of it."""

import pytest
import torch

from prismlm.instruments.uncertainty_feedback import Ablation, Signal
from prismlm.instruments.uncertainty_feedback.ablation import Ablated, ablation
from prismlm.instruments.uncertainty_feedback.signal import own_codes, permuted
from prismlm.statistics import Interval
from tests.helpers.feedback_models import (
    LEVELS,
    make_fed_gpt2,
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
    assert found.tokens == sum(map(len, TEXTS)) - len(TEXTS)

    def loss(given):
        total = torch.zeros(())
        for text, own in zip(TEXTS, given, strict=True):
            logits = model(text[None], uncertainty_codes=own[None], use_cache=False).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits[:-1], text[1:], reduction="sum"
            )
        return float(total) / found.tokens

    zero, neutral = ([torch.full_like(own, code) for own in codes] for code in (-1, LEVELS // 2))
    for row in neutral:
        row[0] = -1
    assert found.loss == pytest.approx(loss(codes), rel=1e-5)
    assert found.of("zero").loss == pytest.approx(loss(zero), rel=1e-5)
    assert found.of("neutral").loss == pytest.approx(loss(neutral), rel=1e-5)
    shuffled = found.of("shuffled")
    assert len(set(shuffled.by_permutation)) == 3
    assert shuffled.change.value == pytest.approx(sum(shuffled.by_permutation) / 3)
    assert shuffled.by_permutation[0] == pytest.approx(
        loss(permuted(codes, 5)) - found.loss, abs=1e-4
    )
    assert shuffled.change.low < shuffled.change.value < shuffled.change.high
    ratio = shuffled.perplexity_change.value
    assert ratio == pytest.approx(shuffled.perplexity / found.perplexity - 1)


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
    for one in found.conditions:
        assert one.change.above_zero
        assert one.perplexity_change.low > 1
    assert found.verdict.startswith("Which code a token gets matters: shuffled codes change")
    # Fed the wrong way round, shuffled codes are the better ones.
    other = permuted(codes, 9)
    assert (
        ablation(reading_of(model, texts, other)).of("neutral").change.value
        < found.of("neutral").change.low
    )


UNCLEAR = Interval(0.05, -0.1, 0.2)
NONE, MORE, LESS = Interval(0.0, -0.1, 0.1), Interval(0.2, 0.1, 0.3), Interval(-0.2, -0.3, -0.1)


@pytest.mark.parametrize(
    ("zero", "shuffled", "codes", "said"),
    [
        (MORE, MORE, 9, "Which code a token gets matters"),
        (MORE, NONE, 9, "says only that a vector is expected there"),
        (NONE, NONE, 9, "No sign that it uses the signal"),
        (MORE, LESS, 9, "for the better"),
        (NONE, UNCLEAR, 9, "Not clear whether it uses the signal"),
        (MORE, NONE, 1, "Says nothing"),
    ],
)
def test_what_is_said_of_ablation(zero, shuffled, codes, said):
    changes = (("zero", zero), ("neutral", NONE), ("shuffled", shuffled))
    conditions = tuple(Ablated(name, 2.0, 7.4, change, change) for name, change in changes)
    verdict = Ablation(12, 100, codes, 2.0, 7.4, conditions).verdict
    assert said in verdict
    assert ("matters" in verdict) == (shuffled is MORE and codes > 1)
    assert "12 texts" in verdict or codes == 1


def test_equal_rows_leave_nothing_to_shuffle_and_a_table_of_zeros_nothing_at_all():
    model, feedback = make_fed_gpt2()
    set_table(feedback, torch.randn(1, 16, generator=torch.Generator().manual_seed(0)))
    codes = own_codes(model, TEXTS, Signal())
    found = ablation(reading_of(model, TEXTS, codes))
    assert set(found.of("shuffled").by_permutation) == {0.0}
    assert found.of("neutral").change.value == found.of("shuffled").change.high == 0
    assert found.of("zero").change.value != 0
    assert found.verdict.startswith("No sign that it uses the signal")
    set_table(feedback, torch.zeros(1, 16))
    for one in ablation(reading_of(model, TEXTS, codes)).conditions:
        assert (one.change.value, one.change.low, one.change.high) == (0, 0, 0)
    one_pass = own_codes(model, TEXTS, Signal("passes", 1))
    assert ablation(reading_of(model, TEXTS, one_pass)).verdict.startswith("Says nothing")
