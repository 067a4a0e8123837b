"""Figures of heads by hand and over batches; the stratified rank test against brute force."""

import math
import random

import pytest
import torch

from prismlm.errors import InputError
from prismlm.models.attention import reading_attention
from prismlm.probes.heads.attention import (
    FIGURES,
    AttentionTally,
    compare_groups,
    distance_bins,
    head_uses,
    stratified_rank_test,
)
from prismlm.probes.results import Table
from tests.helpers.small_models import make_batch, make_gpt2, make_signal_noise, random_rows


def flat(figures):
    return [*(figures[name] for name in FIGURES), *figures["spectrum"]]


def assert_close(first, second, tolerance=1e-6):
    assert flat(first) == pytest.approx(flat(second), abs=tolerance)


def figures(weights, least=2):
    """The figures of one head whose weights are [T, T]."""
    length = len(weights)
    tally = AttentionTally(1)
    visible = torch.arange(1, length + 1)[None]
    tally.add(weights[None, None], visible >= least, visible)
    return tally.figures(0, distance_bins(length))


def test_a_head_that_looks_at_the_token_before():
    result = figures(torch.eye(6).roll(1, 0).tril())
    assert result["distance"] == result["distance_beyond_self"] == 1
    assert result["entropy"] == result["relative_entropy"] == result["self_share"] == 0
    assert result["near_share"] == 1
    # Of the queries 1 to 5 only the first looks at token 0.
    assert result["first_share"] == pytest.approx(1 / 5)
    assert result["spectrum"] == [0, 1, 0, 0, 0]


def test_uniform_attention_by_hand():
    weights = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    result = figures(weights)
    # Queries 1, 2 and 3 see 2, 3 and 4 tokens, at a mean distance of ½, 1 and 1½.
    assert result["distance"] == pytest.approx(1)
    inverse = (1 / 2 + 1 / 3 + 1 / 4) / 3
    assert result["self_share"] == result["first_share"] == pytest.approx(inverse)
    assert result["distance_beyond_self"] == pytest.approx(1 / (1 - inverse))
    assert result["entropy"] == pytest.approx(math.log(2 * 3 * 4) / 3)
    assert result["relative_entropy"] == pytest.approx(1)
    expected = [inverse, inverse, (1 / 3 + 1 / 4) / 3, 1 / 4 / 3]
    assert result["spectrum"] == pytest.approx(expected)
    assert result["near_share"] == pytest.approx(1 - inverse)
    # From 4 visible tokens on the last query alone counts.
    assert figures(weights, least=4)["distance"] == pytest.approx(1.5)


def test_each_head_of_each_layer_is_its_own_weights():
    model = make_signal_noise()
    (row,) = random_rows(24)
    result = head_uses(model, [make_batch(row)], least_visible=3)
    equal = torch.ones(24, 24).tril() / torch.arange(1, 25)[:, None]
    assert_close(result.rows[0], figures(equal, least=3))
    kept = {}
    with torch.no_grad(), reading_attention(model, lambda layer, w: kept.update({layer: w})):
        model(torch.tensor([row]))
    for layer in (0, 1):
        for head in range(8):
            expected = figures(kept[layer][0, head], least=3)
            own = result.rows[1 + 8 * layer + head]
            assert_close(own, expected)
            assert (own["layer"], own["head"]) == (layer, head)
            assert own["group"] == ("signal" if head < 4 else "noise")
    assert [sum(row["spectrum"]) for row in result.rows] == pytest.approx([1] * 17)


@pytest.mark.parametrize("make", [make_signal_noise, make_gpt2])
def test_batches_and_padding_do_not_matter(make):
    model = make()
    rows = random_rows(30, 18, 5, 41)
    whole = head_uses(model, [make_batch(*rows)], least_visible=8)
    parts = head_uses(model, [make_batch(row, width=60) for row in rows[::-1]], least_visible=8)
    assert parts["queries"] == whole["queries"]
    for one, other in zip(whole.rows, parts.rows, strict=True):
        assert flat(one) == pytest.approx(flat(other)[: len(flat(one))], abs=1e-5)


def test_what_cannot_be_read_is_refused():
    model, batch = make_signal_noise(), make_batch(*random_rows(40, 30))
    assert head_uses(model, [make_batch([5])]).rows == ()
    with pytest.raises(InputError, match="embeddings of 64 positions"):
        head_uses(make_gpt2(), [make_batch(*random_rows(65))])
    with pytest.raises(InputError, match="heads are of one kind"):
        compare_groups(head_uses(make_gpt2(), [batch]))
    table = compare_groups(head_uses(model, [batch]))
    assert (table["signal_heads"], table["noise_heads"], table["layers"]) == (4, 4, 2)
    model.model.layers[0].attention.projection.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        head_uses(model, [batch])


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_within_strata(ties):
    draw = random.Random(0)
    first, second = (
        [[draw.randint(0, 3) if ties else draw.random() for _ in range(size)] for size in (5, 7)]
        for _ in range(2)
    )
    effect, p = stratified_rank_test(first, second)
    above = [
        (x > y) + (x == y) / 2
        for a, b in zip(first, second, strict=True) for x in a for y in b
    ]  # fmt: skip
    assert effect == pytest.approx(2 * sum(above) / len(above) - 1)
    assert stratified_rank_test(second, first) == pytest.approx((-effect, p))
    # With one stratum it is Mann and Whitney's, of which the one order counts half.
    assert stratified_rank_test([[4, 5, 6]], [[1, 2, 3]]) == pytest.approx((1, 1 / 20))
    assert stratified_rank_test([[1, 1]], [[1, 1]]) == (0, 1)
    # One stratum does not outweigh all others.
    first, second = [[*range(6, 12)]] * 11 + [[*range(6)]], [[*range(6)]] * 11 + [[*range(6, 12)]]
    effect, p = stratified_rank_test(first, second)
    assert effect > 0.8
    assert 0 < p < 1e-9
    assert stratified_rank_test(second, first) == pytest.approx((-effect, p))
    # Many heads, whose 1 − p rounds to 1.
    many = [list(range(60))], [list(range(60, 120))]
    assert 0 < stratified_rank_test(*many)[1] < 1e-19


def test_groups_that_differ_in_one_figure():
    alike = dict.fromkeys(FIGURES, 0.5)
    heads = [
        alike | {"layer": layer, "group": group, "distance": 10 * layer + more + number}
        for layer in (0, 1)
        for group, more in (("signal", 5), ("noise", 0))
        for number in range(3)
    ]
    table = compare_groups(Table("", "", (alike, *heads), {"layers": (0, 1)}))
    rows = {row["measure"]: row for row in table.rows}
    distance, entropy = rows["distance"], rows["entropy"]
    assert distance["effect"] == 1
    assert distance["p"] < 0.05
    assert (distance["signal_median"], distance["noise_median"]) == (11, 6)
    assert distance["larger"] == "signal"
    assert (entropy["effect"], entropy["p"], entropy["larger"]) == (0, 1, "unclear")
