from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import prismlm
from tests.helpers.html_reader import Reader
from tests.helpers.records import write_jsonl

TEXTS = [
    {"id": "law", "text": "The court ruled that the contract was void and dismissed the appeal."},
    {"id": "tale", "text": "Once upon a time there was a little girl who lived in the woods."},
    {"id": "dose", "text": "The patient was given a dose of the drug, and then another one. " * 9},
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("texts") / "texts.jsonl", TEXTS)


def test_every_report(document, tiny_model, texts, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    files = {name: out / f"a.{name}" for name in ("parquet", "jsonl", "csv", "html")}
    options = [argument for name, path in files.items() for argument in (f"--{name}", path)]
    summary = document("audit", tiny_model, texts, *options)
    assert (summary["texts"], summary["left_out"]) == (3, {})
    rows = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [row["text_id"] for row in rows] == ["law", "tale", "dose"]
    assert pq.read_table(files["parquet"]).to_pylist() == rows
    with files["csv"].open(encoding="utf-8", newline="") as file:
        flat = list(csv.DictReader(file))
    page = files["html"].read_text(encoding="utf-8")
    for line, row in zip(flat, rows, strict=True):
        assert float(line["unattributed"]) == row["unattributed"]
        assert line["top_domain"] == row["by_domain"][0]["key"]
        assert line["top_document"] == row["documents"][0]["doc_id"]
        assert row["text_id"] in page
        for by in ("source", "domain", "license"):
            total = sum(item["share"] for item in row[f"by_{by}"]) + row[f"other_{by}"]
            assert total + row["unattributed"] == pytest.approx(1)


def test_an_audit_in_parts(document, tiny_model, texts, tmp_path):
    command = ("audit", tiny_model, texts, "--parquet")
    expected = document(*command, tmp_path / "one.parquet")
    summary = document(*command, tmp_path / "parts.parquet", "--parts", "2")
    assert summary == expected
    rows = [pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("one", "parts")]
    assert rows[0] == rows[1]


def test_sources(document, tiny_model, texts):
    trace = prismlm.load(tiny_model).explain(TEXTS[0]["text"])
    doc = trace.documents(1)[0].doc_id
    command = ("sources", tiny_model, "--doc", doc)
    alone, measured = document(*command), document(*command, "--file", texts)
    assert alone["texts"] is None
    assert alone["cells"] == measured["cells"]
    assert measured["texts"][0]["share"] >= measured["share"] > 0


def test_compare(prism, document, tiny_model, texts, tmp_path):
    value = document("compare", tiny_model, tiny_model, "--file", texts)
    assert value["texts"]["ce"]["difference"] == 0
    assert value["prototypes"]["by_signature"]["mutual"] == 1
    assert len(value["prototypes"]["pairs"]) == 10
    bare = shutil.copytree(tiny_model, tmp_path / "bare", ignore=lambda *_: ["lens"])
    assert "Shares" not in prism("compare", bare, tiny_model, "--file", texts).stdout
    # A model without a lens has no names; prototypes are compared without texts too.
    alone = prism("compare", bare, tiny_model, "--top", 1).stdout
    assert "b name" in alone
    assert "a name" not in alone


def test_filters_and_methods_of_explain(prism, document, tiny_model):
    explain = ("explain", tiny_model, TEXTS[0]["text"])
    first = document(*explain)["sources"]["items"][0]
    where = ("--where", f"domain={first['key']}")
    sources = document(*explain, *where)["sources"]
    assert sources["items"] == [first]
    assert sources["where"] == {"domain": [first["key"]]}
    total = first["share"] + sources["elsewhere"] + sources["unattributed"]
    assert total == pytest.approx(1, abs=1e-6)
    sources = document(*explain, "--method", "source")["sources"]
    assert sources["method"] == "source"
    assert sum(i["share"] for i in sources["items"]) == pytest.approx(1, abs=1e-6)
    assert "elsewhere" in prism(*explain, *where, "--passages").stdout


def test_explain_reads_and_writes_files(prism, document, tiny_model, texts, tmp_path):
    several = document("explain", tiny_model, "--file", texts)["texts"]
    lines, page, table = (tmp_path / name for name in ("lines.txt", "page.html", "t.parquet"))
    lines.write_text("\n\n".join(row["text"] for row in TEXTS) + "\n", encoding="utf-8")
    command = ("explain", tiny_model, "--file", lines, "--lines", "--parquet", table)
    result = prism(*command, "--html", page, "--json")
    assert result.stderr == f"wrote {page}\nwrote {table}\n"
    by_line = json.loads(result.stdout)["texts"]
    assert len(several) == len(by_line) == 3
    assert several[0] == by_line[0] == document("explain", tiny_model, TEXTS[0]["text"])
    (block,) = Reader(page.read_text(encoding="utf-8")).blocks
    steps = [len(text["positions"]) for text in by_line]
    assert [len(answer["steps"]) for answer in block["answers"]] == steps
    rows, _ = pq.read_table(table).to_pylist(), table.unlink()
    assert {row["text"] for row in rows} == {0, 1, 2}
    uses = (step["prototypes"] for text in by_line for step in text["positions"])
    assert len(rows) == sum(map(len, uses))
    prism(*command, "--parts", "1")
    assert pq.read_table(table).to_pylist() == rows
