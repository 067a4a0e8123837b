"""The loss with other codes."""

import pytest
import torch

from prismlm.instruments.uncertainty_feedback import Signal
from prismlm.instruments.uncertainty_feedback.losses import ablation
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
    shuffled, draws = others[2], others[2]["by_permutation"]
    assert len(set(draws)) == 3
    change = shuffled["change"]
    assert change.value == pytest.approx(sum(draws) / 3)
    assert draws[0] == pytest.approx(loss(permuted(codes, 5)) - own["loss"], abs=1e-4)
    assert change.low < change.value < change.high
    ratio = shuffled["perplexity_change"].value
    assert ratio == pytest.approx(shuffled["perplexity"] / own["perplexity"] - 1)
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
        assert row["perplexity_change"].low > 1
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
    assert set(shuffled["by_permutation"]) == {0.0}
    assert neutral["change"].value == shuffled["change"].high == 0
    assert zero["change"].value != 0
    assert found.findings[0]["effect"] == "may be chance"
    set_table(feedback, torch.zeros(1, 16))
    for row in ablation(reading_of(model, TEXTS, codes)).rows[1:]:
        assert row["change"] == Interval(0, 0, 0)
    one_pass = own_codes(model, TEXTS, Signal("passes", 1))
    assert ablation(reading_of(model, TEXTS, one_pass)).findings[0]["effect"] == "undefined"
