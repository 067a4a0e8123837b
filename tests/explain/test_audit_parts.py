"""Audits in parts against the audit of the same texts in one."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns
from prismlm.corpus.read import DocumentReader
from prismlm.errors import InputError
from prismlm.explain import audit_parts
from prismlm.explain.audit import Audit
from prismlm.explain.audit_parts import AuditPart, audit_in_parts

TEXT = "the court ruled that a patient was given once upon time little girl in woods"
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [" ".join(WORDS[i % 7 : 8 + i % 8]) for i in range(150)] + ["", "a"]
    path.write_text(
        "".join(json.dumps({"text": text, "id": str(i)}) + "\n" for i, text in enumerate(rows))
    )
    return path


@pytest.fixture
def part(lm, texts, tmp_path):
    columns = Columns(id="id")
    return AuditPart(lm.path, (texts,), tmp_path / "rows.parquet", columns=columns, window=16)


@pytest.fixture(scope="module")
def straight(lm, texts):
    audit = Audit(lm, window=16)
    reader = DocumentReader(texts, Columns(id="id"), answered_chats="last")
    return audit, list(audit.read(reader)), dict(reader.left_out)


def close(value, expected):
    """Compare JSON; batches of other texts round differently."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            close(value[k], expected[k]) for k in expected
        )
    if isinstance(expected, (list, tuple)):
        return len(value) == len(expected) and all(map(close, value, expected))
    if isinstance(expected, float):
        return value == pytest.approx(expected, rel=1e-4, abs=1e-6)
    return value == expected


def check(part, straight, count, **how):
    found, left_out = audit_in_parts(part, count, **how)
    audit, rows, expected_left_out = straight
    assert left_out == expected_left_out == {"no text": 1}
    written = pq.read_table(part.out).to_pylist()
    assert [row["text_id"] for row in written] == [row["text_id"] for row in rows]
    assert close(written, rows)
    summary, expected = found.to_dict(), audit.to_dict()
    lists = ("least_supported", "least_attributed", "most_matching")
    for name in lists:  # of equal texts, others may be listed
        for side in (summary, expected):
            side[name] = [row.get("share", row.get("score")) for row in side[name]]
    assert close(summary, expected)
    assert list(part.out.parent.iterdir()) == [part.out]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_have_the_sums_and_rows_of_one(part, straight, count):
    check(part, straight, count)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray", "datatrove"])
def test_workers(part, straight, engine):
    if engine != "local":
        pytest.importorskip(engine)
    check(part, straight, 3, engine=engine, workers=2)


def test_finished_parts_are_not_read_again(part, straight, monkeypatch):
    part(None, 1, 2)
    made = []
    monkeypatch.setattr(
        audit_parts, "documents_of", lambda *given: made.append(given[1:]) or _parts(*given)
    )
    check(part, straight, 2)
    assert made == [(0, 2)]


_parts = audit_parts.documents_of


def test_parts_of_another_input(part, straight, texts, tmp_path):
    replace(part, window=8)(None, 0, 2)
    with pytest.raises(InputError, match="window") as refused:
        audit_in_parts(part, 2)
    assert "--overwrite" in str(refused.value)
    check(part, straight, 2, overwrite=True)
    part(None, 0, 2)
    other = tmp_path / "other.jsonl"
    other.write_text(texts.read_text() + json.dumps({"text": "one more", "id": "more"}) + "\n")
    with pytest.raises(InputError, match="texts"):
        audit_in_parts(replace(part, files=(other,)), 2)
