"""The whole study: a run that resumes, and one that was begun with something else."""

import re

import pyarrow.parquet as pq
import pytest

from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt, Writing
from prismlm.eval.judging.judges import EndpointJudge, LocalJudge
from prismlm.eval.judging.study import (
    CONTINUATIONS_TABLE,
    RESULT_FILE,
    VERDICTS_TABLE,
    named,
    run_judging,
)
from prismlm.files import read_json
from prismlm.lens.labels.endpoint import Endpoint
from tests.helpers.chat_server import ChatServer

REFERENCE = " ".join(f"word{i:02}" for i in range(6))
PROMPTS = [Prompt(str(n), f"Story {n} begins so", f"{REFERENCE} {n}") for n in range(12)]
HOW = Writing(words=5, tokens=8)


def reads(request, number):
    """Prefer the reference, or else the response that is first in the alphabet."""
    lines = request["messages"][0]["content"].split("\n")
    _, a, b = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("<data-")]
    for one, other, name in ((a, b, "A"), (b, a, "B")):
        if one.startswith(REFERENCE) and not other.startswith(REFERENCE):
            return {"verdict": name}
    return {"verdict": "A" if a < b else "B"}


def by_endpoint(url):
    return lambda kept: EndpointJudge(Endpoint(url, "m", retries=0), kept)


def test_a_study_that_was_stopped_goes_on_and_takes_another_model(ordinary, tiny_model, tmp_path):
    out = tmp_path / "out"
    with (
        ChatServer(
            lambda request, number: reads(request, number) if number < 40 else (500, "")
        ) as s,
        pytest.raises(InputError, match="kept in"),
    ):
        run_judging(named(ordinary), PROMPTS, HOW, out, by_endpoint(s.url))
    assert not (out / RESULT_FILE).exists()
    with ChatServer(reads) as server:
        judge = by_endpoint(server.url)
        study = (named(ordinary), PROMPTS, HOW, out, judge)
        found = run_judging(*study)
        # Of 72 questions of the examination and 24 about the models 40 were answered before.
        assert len(server.requests) == 56
        assert found == read_json(out / RESULT_FILE)
        server.requests.clear()
        again = run_judging(*study)
        assert server.requests == []
        assert again["ratings"] == found["ratings"]
        more = run_judging(named([*ordinary, tiny_model]), *study[1:])
        # Two pairs more, unless two models write the same.
        assert 0 < len(server.requests) <= 48
    assert found["judge"]["usable"]
    assert found["ratings"]["readable"]
    assert found["ratings"]["order"]["changed"]["value"] == 0
    assert len(more["ratings"]["pairs"]) == 3
    assert more["ratings"]["pairs"][0] == found["ratings"]["pairs"][0]
    texts = pq.read_table(out / CONTINUATIONS_TABLE)
    assert texts.num_rows == 36
    assert set(texts["model"].to_pylist()) == {"a", "b", tiny_model.name}


def test_ratings_are_of_the_verdicts_that_are_kept(ordinary, tmp_path):
    out, judge = tmp_path / "out", LocalJudge(ordinary[0])
    found = run_judging(named(ordinary), PROMPTS, HOW, out, lambda kept: judge)
    rows = pq.read_table(out / VERDICTS_TABLE).to_pylist()
    (pair,) = found["ratings"]["pairs"]
    assert pair["score"]["value"] == pytest.approx(sum(row["score_a"] for row in rows) / 12)
    assert pair["won"] + pair["lost"] <= pair["games"] == 12
    best = max(found["ratings"]["models"], key=lambda one: one["bradley_terry"]["value"])
    assert best["model"] == ("a" if pair["score"]["value"] >= 0.5 else "b")
    # Random weights know nothing of order.
    assert not found["judge"]["usable"]
    assert not found["ratings"]["readable"]


def test_another_run_is_refused(ordinary, tmp_path):
    out, models = tmp_path / "out", named(ordinary[:1])
    run_judging(models, PROMPTS, HOW, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=re.escape("(tokens: 8 → 9)")):
        run_judging(models, PROMPTS, Writing(words=5, tokens=9), out)
    with pytest.raises(InputError, match="prompts: "):
        run_judging(models, PROMPTS[:5], HOW, out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
