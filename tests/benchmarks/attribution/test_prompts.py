"""Prompts are collected again without losing what a reader judged, and sheets are blind."""

import numpy as np
import pytest

import prismlm
from benchmarks.attribution.prompts import (
    _drawn,
    _entries,
    _judgements,
    collect,
    judged,
    number_of,
    sheet,
)
from benchmarks.attribution.render_prompts import render
from tests.helpers.chats import chatting
from tests.helpers.next_tokens import next_tokens


@pytest.fixture(scope="module")
def lm(tiny_model, tmp_path_factory):
    return prismlm.load(chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def collected(lm):
    return collect(lm, {})


def test_a_place_drawn_by_chance_has_the_same_next_token(lm):
    corpus, cells = lm.lens.corpus, lm.lens.cells
    position = int(cells.positions(5, 1)[0]) + 1
    token = corpus.read_tokens(position, 1)
    generator = np.random.default_rng(0)
    drawn = [_drawn(lm.lens, cells, position, generator) for _ in range(200)]
    assert {int(corpus.read_tokens(one.position, 1)[0]) for one in drawn} == {int(token[0])}
    # All of them can be drawn: with so many draws, about all of few are.
    rows = np.flatnonzero(next_tokens(cells, np.arange(len(cells))) == int(token[0]))
    places = {int(p) + 1 for p in cells.records(rows)["position"]}
    found = {one.position for one in drawn}
    assert found <= places
    assert len(found) > 0.5 * min(len(places), 200)
    assert all(corpus.doc_ids[corpus.document_at(o.position)] == o.doc_id for o in drawn)


def test_a_sheet_tells_nothing_of_the_kind_and_is_taken_in(lm, collected):
    text = sheet(collected, lm)
    keys = list(_entries(collected))
    assert all(text.count(number_of(key)) == 1 for key in keys)
    asked = collected["prompts"][0]
    listed = [line.split()[1] for line in text.split("\n#")[1].splitlines()[1:] if line]
    assert listed == sorted(listed)
    assert len(asked["passages"]) == len(asked["by_chance"]) > 0
    with pytest.raises(SystemExit, match="nobody judged"):
        render(collected)
    # All of the subject but one, which is then said to be of no other.
    first = number_of((asked["prompt"], asked["passages"][0]["doc_id"],
                       asked["passages"][0]["position"]))  # fmt: skip
    answers = text.replace("\n? ", "\ny ").replace(f"y {first}", f"n {first}")
    result = judged(collected, answers)
    assert _judgements(result) == {key: number_of(key) != first for key in keys}
    passages = sum(len(row["passages"]) for row in result["prompts"])
    assert f"**1 of {passages} passages" in render(result)
    # A second collection keeps them, and leaves nothing to judge.
    again = collect(lm, _judgements(result))
    assert again["prompts"] == result["prompts"]
    assert "?" not in {line[:1] for line in sheet(again, lm).splitlines()}
