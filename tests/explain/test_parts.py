"""Audits and explanations in parts against those of the same texts in one process."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Columns
from prismlm.errors import InputError
from prismlm.explain.audit import Audit
from prismlm.explain.parts import AuditJob, TraceJob, audit_in_parts, explain_in_parts
from prismlm.explain.trace import write_parquet

TEXT = "the court ruled that a patient was given once upon time little girl in woods"
WORDS = TEXT.split()
PROMPTS = ["the court ruled that", "a", "a patient was given", "once upon a time", "little girl in"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [" ".join(WORDS[i % 7 : 8 + i % 8]) for i in range(80)] + ["", "a"]
    lines = (json.dumps({"text": text, "id": str(i)}) + "\n" for i, text in enumerate(rows))
    path.write_text("".join(lines))
    return path


@pytest.fixture
def audited(lm, texts, tmp_path):
    given = {"files": (texts,), "columns": Columns(id="id"), "window": 16}
    return AuditJob(lm.path, tmp_path / "audit" / "rows.parquet", **given)


@pytest.fixture
def explained(lm, tmp_path):
    prompts = tuple((prompt, 2 * (number % 2)) for number, prompt in enumerate(PROMPTS))
    return TraceJob(lm.path, tmp_path / "explain" / "rows.parquet", texts=prompts)


@pytest.fixture(scope="module")
def straight(lm, texts):
    audit = Audit(lm, window=16)
    reader = AuditJob(lm.path, texts, files=(texts,), columns=Columns(id="id")).reader()
    return audit, list(audit.read(reader)), dict(reader.left_out)


def check_close(value, expected):
    """Compare JSON; batches of other texts round differently."""

    def near(number):
        return pytest.approx(float(number), rel=1e-4, abs=1e-6)

    assert json.loads(json.dumps(value)) == json.loads(json.dumps(expected), parse_float=near)


def check_audit(job, straight, count, **how):
    found, left_out = audit_in_parts(job, count, **how)
    audit, rows, expected_left_out = straight
    assert left_out == expected_left_out == {"no text": 1}
    written = pq.read_table(job.out).to_pylist()
    assert [row["text_id"] for row in written] == [row["text_id"] for row in rows]
    check_close(written, rows)
    summary, expected = found.to_dict(), audit.to_dict()
    lists = ("least_supported", "least_attributed", "most_matching")
    for name in lists:  # of equal texts, others may be listed
        for side in (summary, expected):
            side[name] = [row.get("share", row.get("score")) for row in side[name]]
    check_close(summary, expected)
    assert list(job.out.parent.iterdir()) == [job.out]


def check_traces(lm, job, count, **how):
    explain_in_parts(job, count, **how)
    one = job.out.parent.with_suffix(".parquet")
    write_parquet([lm.explain(text, generate=tokens) for text, tokens in job.texts], one)
    assert rows_of(job.out) == rows_of(one)
    assert list(job.out.parent.iterdir()) == [job.out]


def rows_of(path):
    rows = pq.read_table(path).to_pylist()
    return [{k: v for k, v in row.items() if v is not None} for row in rows]


def test_parts_have_the_sums_and_rows_of_one(lm, audited, explained, straight):
    check_audit(audited, straight, 7)
    check_traces(lm, explained, 7)


@pytest.mark.slow
def test_workers(lm, audited, explained, straight, engine):
    check_audit(audited, straight, 3, engine=engine, workers=2)
    check_traces(lm, explained, 3, engine=engine, workers=2)


def test_finished_parts_are_kept_and_those_of_other_inputs_refused(audited, monkeypatch):
    job, run, made, make = audited, audit_in_parts, [], AuditJob.make

    def interrupted(self, directory, rank, count):
        made.append(rank)
        if len(made) in (2, 4):
            raise KeyboardInterrupt
        make(self, directory, rank, count)

    monkeypatch.setattr(AuditJob, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(replace(job, window=8), 2)
    with pytest.raises(InputError, match=r"window.*--overwrite"):
        run(job, 2)
    with pytest.raises(KeyboardInterrupt):
        run(job, 2, overwrite=True)
    run(job, 2)
    assert made == [0, 1, 0, 1, 1]
    assert list(job.out.parent.iterdir()) == [job.out]
