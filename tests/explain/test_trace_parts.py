"""Explanations in parts against those of the same texts in one process."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from prismlm.errors import InputError
from prismlm.explain.trace import write_parquet
from prismlm.explain.trace_parts import TracePart, explain_in_parts

PROMPTS = ["the court ruled that", "a", "a patient was given", "once upon a time", "little girl in"]


@pytest.fixture
def part(lm, tmp_path):
    texts = tuple((prompt, 2 * (number % 2)) for number, prompt in enumerate(PROMPTS))
    return TracePart(lm.path, texts, tmp_path / "rows.parquet")


def rows_of(path):
    rows = pq.read_table(path).to_pylist()
    return [{k: v for k, v in row.items() if v is not None} for row in rows]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_have_the_rows_of_one(lm, part, tmp_path, count):
    explain_in_parts(part, count)
    traces = [lm.explain(prompt, generate=tokens) for prompt, tokens in part.texts]
    write_parquet(traces, tmp_path / "one.parquet")
    assert rows_of(part.out) == rows_of(tmp_path / "one.parquet")
    assert len(list(tmp_path.iterdir())) == 2


def test_finished_parts_are_kept_and_those_of_other_texts_refused(part, monkeypatch):
    part(None, 1, 2)
    other = replace(part, texts=part.texts[:3])
    with pytest.raises(InputError, match="texts"):
        explain_in_parts(other, 2)
    made, opened = [], TracePart.open
    monkeypatch.setattr(TracePart, "open", lambda self: made.append(self) or opened(self))
    explain_in_parts(part, 2)
    # Once for the check, and once for the part that was missing.
    assert len(made) == 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray", "datatrove"])
def test_workers(part, tmp_path, engine):
    if engine != "local":
        pytest.importorskip(engine)
    explain_in_parts(replace(part, out=tmp_path / "one.parquet"), 1)
    explain_in_parts(part, 3, engine=engine, workers=2)
    assert rows_of(part.out) == rows_of(tmp_path / "one.parquet")
