"""Asking over real HTTP, against explain itself."""

import pytest

import prismlm

TEXT = "The patient was given a dose of the drug"


@pytest.fixture(scope="module")
def lm(tiny_model):
    return prismlm.load(tiny_model)


def test_steps_come_as_the_model_writes_and_the_trace_at_the_end(served, lm):
    events = served.events("/api/ask", {"text": TEXT, "generate": 6})
    names = [name for name, _ in events]
    trace = lm.explain(TEXT, generate=6)
    assert names == ["start"] + ["step"] * len(trace) + ["done"]
    for (_, told), step in zip(events[1:-1], trace, strict=True):
        parts = sum(value for _, value in told["uses"]) + told["residual"] + told["bias"]
        assert parts == pytest.approx(told["logit"], abs=1e-3 * max(1, abs(told["logit"])))
        assert told["probability"] == pytest.approx(step.probability, rel=1e-4)
    done = events[-1][1]
    assert len(done["trace"]["steps"]) == len(trace)
    key = done["id"]
    behind = served.json("GET", f"/api/answers/{key}/steps/{len(trace) - 1}")
    shares = [passage.share for passage in trace[-1:].passages(8)]
    assert [one["share"] for one in behind["for"]] == pytest.approx(shares, rel=1e-4)
    status, headers, page = served.ask("GET", f"/api/answers/{key}/report.html")
    assert status == 200
    assert "attachment" in headers["content-disposition"]
    assert b"<article" in page
