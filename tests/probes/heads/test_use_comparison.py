"""The stratified rank test against brute force, and groups of heads that differ or do not."""

import itertools
import math
import random

import pytest

from prismlm.errors import InputError
from prismlm.probes.heads.use import (
    FIGURES,
    across_models,
    compare_groups,
    head_uses,
    stratified_rank_test,
)
from prismlm.probes.results import Table
from tests.helpers.head_models import make_batch, make_gpt2, make_signal_noise, random_rows


def brute_force(first, second):
    """U and p over every assignment of labels within strata."""

    def u_of(own, other):
        return sum((x > y) + (x == y) / 2 for x in own for y in other)

    options = []
    for own, other in zip(first, second, strict=True):
        values, found = [*own, *other], []
        for chosen in itertools.combinations(range(len(values)), len(own)):
            rest = [values[i] for i in range(len(values)) if i not in chosen]
            found.append(u_of([values[i] for i in chosen], rest))
        options.append(found)
    mean = sum(len(own) * len(other) / 2 for own, other in zip(first, second, strict=True))
    u = sum(u_of(own, other) for own, other in zip(first, second, strict=True))
    sums = [sum(combined) for combined in itertools.product(*options)]
    return u, sum(abs(s - mean) >= abs(u - mean) for s in sums) / len(sums)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [[(3, 3)], [(2, 4), (3, 2)], [(3, 3), (3, 3), (2, 2)]])
def test_against_every_permutation(sizes, ties):
    draw = random.Random(0)
    for _ in range(5):
        first, second = (
            [[draw.randint(0, 3) if ties else draw.random() for _ in range(s[k])] for s in sizes]
            for k in (0, 1)
        )
        u, p = brute_force(first, second)
        effect = 2 * u / sum(m * n for m, n in sizes) - 1
        assert stratified_rank_test(first, second) == pytest.approx((effect, p))


def uses_of(distance=lambda *_: 1.0, **entropies):
    """Heads whose distance is given by layer, group and place, entropy by group; all else alike."""
    alike = dict.fromkeys(FIGURES, 0.5)
    rows = [alike | {"group": "uniform", "entropy": 4.69}]
    for layer in (0, 1):
        for group in ("signal", "noise"):
            row = alike | {"layer": layer, "group": group, "entropy": entropies.get(group, 0.5)}
            rows += [row | {"distance": distance(layer, group, place)} for place in range(3)]
    return Table("", {}, tuple(rows), {"layers": (0, 1)})


def test_heads_near_uniform_attention_attend_everywhere_alike():
    # 0.997 of uniform entropy, and one that attends to half of what it sees.
    found = compare_groups(uses_of(signal=0.997 * 4.69, noise=4.69 - math.log(2)))
    assert found["attend_everywhere_alike"] == ["signal"]
    found = compare_groups(uses_of(signal=4.5, noise=4.6))
    assert found["attend_everywhere_alike"] == ["noise"]


def test_groups_that_differ_in_one_figure():
    found = compare_groups(
        uses_of(lambda layer, group, k: 10 * layer + k + 5 * (group == "signal"))
    )
    distance = found.row(measure="distance")
    assert distance["effect"] == 1
    assert distance["p"] == pytest.approx(2 / 400)
    assert (distance["signal_median"], distance["noise_median"]) == (11, 6)
    assert (distance["layers_above"], distance["layers_below"]) == (2, 0)
    assert distance["larger"] == "signal"
    entropy = found.row(measure="entropy")
    assert (entropy["effect"], entropy["p"], entropy["larger"]) == (0, 1, "unclear")
    # A group that attends to all it sees alike has no reach of its own.
    reach = compare_groups(uses_of(lambda _, group, k: k + 5 * (group == "signal"), signal=4.69))
    assert reach.row(measure="distance")["larger"] == "signal, alike"
    assert reach["attend_everywhere_alike"] == ["signal"]
    reach = compare_groups(uses_of(lambda _, group, k: k + 5 * (group == "signal"), noise=4.69))
    assert reach.row(measure="distance")["larger"] == "signal"


def test_several_models_are_several_observations():
    above = compare_groups(uses_of(lambda layer, group, k: k + 5 * (group == "signal")))
    below = compare_groups(uses_of(lambda layer, group, k: k - 5 * (group == "signal")))
    found = across_models([above, above, below]).rows[0]
    assert found["measure"] == "distance"
    assert found["effects"] == [1, 1, -1]
    assert (found["positive"], found["negative"], found["p"]) == (2, 1, 1)
    assert across_models([above] * 3).rows[0]["p"] == pytest.approx(0.25)


def test_of_models():
    batch = make_batch(*random_rows(40, 30))
    found = compare_groups(head_uses(make_signal_noise(), [batch]))
    assert (found["signal_heads"], found["noise_heads"], found["layers"]) == (4, 4, 2)
    assert len(found.rows) == 7
    assert all(0 < row["p"] <= 1 for row in found.rows)
    with pytest.raises(InputError, match="heads are of one kind"):
        compare_groups(head_uses(make_gpt2(), [batch]))
