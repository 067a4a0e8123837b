"""What a command would take: one value, and the clock behind its rates."""

import copy
import json

import pytest

from prismlm.cost import Cost, peak_memory, rate_of, seconds_of


def test_figures_and_parts_are_attributes_and_json():
    first = Cost(2.0, 10, 100, {"steps": 4}, name="first")
    whole = Cost(None, 10, 100, {"tokens": None, "runs": 3}, (first,), unknown=("How much.",))
    assert (whole.runs, whole.tokens, whole.first.steps) == (3, None, 4)
    with pytest.raises(AttributeError, match="no stpes: it has tokens, runs, first"):
        _ = whole.stpes
    assert copy.deepcopy(whole) == whole
    found = json.loads(json.dumps(whole.to_dict()))
    assert found["seconds"] is None
    assert found["runs"] == 3
    assert found["first"]["seconds"] == 2.0
    assert found["unknown"] == ["How much."]


def test_a_call_that_is_timed_is_made_once_more_to_warm_up():
    made = []
    assert seconds_of(lambda: made.append(0), 3) >= 0
    assert len(made) == 4


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to."""
    now = [0.0]
    monkeypatch.setattr("prismlm.cost.time.perf_counter", lambda: now[0])

    def work(*steps):
        for seconds, amount in steps:
            now[0] += seconds
            yield amount

    return work


def test_a_rate_leaves_the_first_step_out_and_ends_in_time(clock):
    # The first took 100 s; then 30 in 3 s.
    assert rate_of(clock((100, 10), (1, 10), (2, 20))) == 10
    # It is all there is.
    assert rate_of(clock((4, 10))) == 2.5
    assert rate_of(clock()) == 0
    slow = clock((1, 1), (3, 3), (3, 3), (3, 3))
    assert rate_of(slow, seconds=5) == 1
    assert list(slow) == [3]
    many = clock((1, 1), (1, 4), (1, 4), (1, 4))
    assert rate_of(many, enough=8) == 4
    assert list(many) == [4]


def test_the_peak_of_memory_is_in_bytes():
    block = bytearray(80_000_000)
    assert peak_memory() > len(block)
