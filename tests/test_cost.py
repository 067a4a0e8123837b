"""The expected cost of a command, and the measurements behind it."""

import json

import pytest

from prismlm.cost import Cost, rate_of


def test_a_cost_is_json():
    cost = Cost(None, 10, 100, {"tokens": None, "runs": 3}, unknown=("How much.",))
    value = json.loads(json.dumps(cost.to_dict()))
    assert (value["seconds"], value["runs"], value["unknown"]) == (None, 3, ["How much."])


@pytest.fixture
def clock(monkeypatch):
    """Simulate steps of (seconds, amount)."""
    now = [0.0]
    monkeypatch.setattr("prismlm.cost.time.perf_counter", lambda: now[0])

    def work(*steps):
        for seconds, amount in steps:
            now[0] += seconds
            yield amount

    return work


def test_a_rate_omits_the_first_step_and_stops_in_time(clock):
    # The first took 100 s; then 30 in 3 s.
    assert rate_of(clock((100, 10), (1, 10), (2, 20)), 5) == 10
    assert rate_of(clock((4, 10)), 5) == 2.5
    assert rate_of(clock(), 5) == 0
    slow = clock((1, 1), (3, 3), (3, 3), (3, 3))
    assert rate_of(slow, seconds=5) == 1
    assert list(slow) == [3]
    many = clock((1, 1), (1, 4), (1, 4), (1, 4))
    assert rate_of(many, 5, enough=8) == 4
    assert list(many) == [4]
