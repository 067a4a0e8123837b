"""The whole study: a run that resumes, and one that was begun with something else."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from prismlm.errors import InputError
from prismlm.eval.judging.continuations import Prompt, Writing
from prismlm.eval.judging.judges import EndpointJudge, LocalJudge
from prismlm.eval.judging.study import (
    CONTINUATIONS_TABLE,
    MOST,
    RESULT_FILE,
    VERDICTS_TABLE,
    Study,
    bradley_terry,
    named,
    online_elo,
    rate,
    run_judging,
    wins_of,
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
    out, told = tmp_path / "out", []
    with ChatServer(
        lambda request, number: reads(request, number) if number < 40 else (500, "")
    ) as s:
        study = Study(named(ordinary), PROMPTS, HOW, out, by_endpoint(s.url))
        with pytest.raises(InputError, match="kept in"):
            run_judging(study)
    assert not (out / RESULT_FILE).exists()
    with ChatServer(reads) as server:
        judge = by_endpoint(server.url)
        study = Study(named(ordinary), PROMPTS, HOW, out, judge)
        found = run_judging(study, announce=lambda *asked: told.append(asked[:2]))
        # Of 72 questions of the examination and 24 about the models 40 were answered before.
        assert len(server.requests) == 56
        assert [name for name, _ in told] == ["the judge's examination", "models"]
        assert sum(count for _, count in told) == 56
        assert found == read_json(out / RESULT_FILE)
        server.requests.clear()
        again = run_judging(study)
        assert server.requests == []
        assert again["ratings"] == found["ratings"]
        more = run_judging(Study(named([*ordinary, tiny_model]), PROMPTS, HOW, out, judge))
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
    study = Study(
        named(ordinary), PROMPTS, HOW, tmp_path / "out", lambda kept: LocalJudge(ordinary[0], kept)
    )
    found = run_judging(study)
    rows = pq.read_table(study.out / VERDICTS_TABLE).to_pylist()
    (pair,) = found["ratings"]["pairs"]
    assert pair["score"]["value"] == pytest.approx(sum(row["score_a"] for row in rows) / 12)
    assert pair["won"] + pair["lost"] <= pair["games"] == 12
    best = max(found["ratings"]["models"], key=lambda one: one["bradley_terry"]["value"])
    assert best["model"] == ("a" if pair["score"]["value"] >= 0.5 else "b")
    # Random weights know nothing of order.
    assert not found["judge"]["usable"]
    assert not found["ratings"]["readable"]


def test_another_run_is_refused(ordinary, tmp_path):
    study = Study(named(ordinary[:1]), PROMPTS, HOW, tmp_path / "out")
    run_judging(study)
    before = {path: path.read_bytes() for path in study.out.iterdir()}
    other = Study(study.models, PROMPTS, Writing(words=5, tokens=9), study.out)
    with pytest.raises(InputError, match=re.escape("(tokens: 8 → 9)")):
        run_judging(other)
    with pytest.raises(InputError, match="prompts: "):
        run_judging(Study(study.models, PROMPTS[:5], HOW, study.out))
    assert {path: path.read_bytes() for path in study.out.iterdir()} == before


def test_online_elo_of_three_games_by_hand():
    # A wins: expected 1/2, so that it gets 2. Then B wins: expected of A is 1 / (1 + 10^(−4/400)),
    # 0.5057562, which it loses four times. Then a tie: A, a little behind, gains a little.
    score = np.array([[1.0, 0.0, 0.5]])
    first, second = np.zeros((1, 3), int), np.ones((1, 3), int)
    after = [online_elo(first[:, :n], second[:, :n], score[:, :n], 2)[0, 0] for n in (1, 2, 3)]
    assert after[0] == 1002
    assert after[1] == pytest.approx(1002 - 4 * 0.5057562, abs=1e-6)
    assert after[2] == pytest.approx(999.976975 + 4 * (0.5 - 0.4999337), abs=1e-6)
    assert online_elo(first, second, score, 2).sum() == 2000


@pytest.mark.parametrize("scores", [[1, 1, 0], [1, 0.5, 0.5]], ids=["wins", "ties"])
def test_bradley_terry_of_three_games_by_hand(scores):
    # Two of three points are odds of 2 to 1, which 400 log10(2) = 120.412 ratings give.
    wins = wins_of(np.array(scores, float)[:, None], 2)
    assert wins.tolist() == [[0, 2], [1, 0]]
    assert bradley_terry(wins).tolist() == pytest.approx([1060.206, 939.794], abs=1e-3)


def test_strengths_of_four_players_are_found_again():
    points = np.array([800.0, 950.0, 1050.0, 1200.0])
    chance = 1 / (1 + 10 ** ((points[None] - points[:, None]) / 400))
    np.fill_diagonal(chance, 0)
    assert bradley_terry(chance * 7) == pytest.approx(points, abs=1e-6)
    uneven = np.arange(1, 17).reshape(4, 4) * chance
    uneven = uneven + uneven.T * np.where(chance > 0, chance / np.where(chance > 0, chance.T, 1), 0)
    assert bradley_terry(uneven) == pytest.approx(points, abs=1e-6)


def test_who_never_loses_ends_at_the_bound_and_who_never_played_at_the_start():
    best, worst = rate(np.ones((4, 1)), 2)
    assert best.bradley_terry.value == pytest.approx(1000 + MOST)
    assert worst.bradley_terry.value == pytest.approx(1000 - MOST)
    scores = np.array([[0.5, np.nan, np.nan]] * 3)
    assert [one.bradley_terry.value for one in rate(scores, 3)] == pytest.approx([1000] * 3)
