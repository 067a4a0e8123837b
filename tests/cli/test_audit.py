from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from tests.helpers.html_reader import Reader

TEXTS = [
    {"id": "law", "text": "The court ruled that the contract was void and dismissed the appeal."},
    {"id": "tale", "text": "Once upon a time there was a little girl who lived in the woods."},
    {"id": "dose", "text": "The patient was given a dose of the drug, and then another one. " * 9},
]


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TEXTS), encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_every_report(prism, tiny_model, texts, out):
    files = {name: out / f"a.{name}" for name in ("parquet", "jsonl", "csv", "html")}
    written = [argument for name, path in files.items() for argument in (f"--{name}", path)]
    result = prism("audit", tiny_model, texts, "--json", *written)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["texts"], summary["left_out"]) == (3, {})
    assert summary["corpus"]["trained_on"] is True
    assert sorted(path.name for path in out.iterdir()) == sorted(p.name for p in files.values())
    rows = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [row["text_id"] for row in rows] == ["law", "tale", "dose"]
    assert pq.read_table(files["parquet"]).to_pylist() == rows
    with files["csv"].open(encoding="utf-8", newline="") as file:
        flat = list(csv.DictReader(file))
    for line, row in zip(flat, rows, strict=True):
        assert float(line["unattributed"]) == row["unattributed"]
        assert line["top_domain"] == row["by_domain"][0]["key"]
        assert line["top_document"] == row["documents"][0]["doc_id"]
    page = files["html"].read_text(encoding="utf-8")
    assert all(row["text_id"] in page for row in rows)
    for row in rows:
        for by in ("source", "domain", "license"):
            total = sum(item["share"] for item in row[f"by_{by}"]) + row[f"other_{by}"]
            assert total + row["unattributed"] == pytest.approx(1)


@pytest.mark.parametrize("columns", [80, 120])
def test_human_output_fits(prism, tiny_model, texts, columns):
    doc = pq.read_table(tiny_model / "lens" / "sample" / "index.parquet")["doc_id"][0].as_py()
    for arguments in (
        ("audit", tiny_model, texts, "--where", "license=CC0-1.0", "--by", "document"),
        ("sources", tiny_model, "--doc", doc, "--file", texts),
        ("compare", tiny_model, tiny_model, "--file", texts),
    ):
        result = prism(*arguments, columns=columns)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        assert max(cell_len(line.rstrip()) for line in lines) <= columns, arguments[0]
        assert "\x1b" not in result.stdout


def test_estimate_writes_nothing(prism, tiny_model, texts, out):
    arguments = ["audit", tiny_model, texts, "--html", out / "a.html", "--dry-run", "--json"]
    result = prism(*arguments)
    assert result.returncode == 0, result.stderr
    estimate = json.loads(result.stdout)
    assert estimate["texts"] == 3
    assert estimate["memory_bytes"] > 1e8
    assert min(estimate["seconds"], estimate["disk_bytes"], estimate["tokens_per_second"]) > 0
    assert list(out.iterdir()) == []


def test_sources_and_compare_as_json(prism, tiny_model, texts, out):
    rows = out / "a.parquet"
    result = prism("audit", tiny_model, texts, "--parquet", rows, "--json")
    doc = json.loads(result.stdout)["documents"][0]["doc_id"]
    found = [
        json.loads(prism("sources", tiny_model, "--doc", doc, *how, "--json").stdout)
        for how in ((), ("--file", texts), ("--audit", rows))
    ]
    assert found[0]["texts"] is None
    assert found[0]["uses"] == found[1]["uses"]
    listed = {text["text_id"]: text["share"] for text in found[2]["texts"]}
    measured = {text["text_id"]: text["share"] for text in found[1]["texts"]}
    assert listed
    assert found[2]["least_share"] == 0.01
    assert "least_share" not in found[1]
    assert min(listed.values()) >= 0.01
    assert listed.items() <= {key: pytest.approx(x) for key, x in measured.items()}.items()
    pairs = out / "pairs.parquet"
    arguments = ["compare", tiny_model, tiny_model, "--file", texts, "--parquet", pairs, "--json"]
    result = prism(*arguments)
    value = json.loads(result.stdout)
    assert value["texts"]["ce"]["difference"] == 0
    assert value["prototypes"]["by_signature"]["mutual"] == 1
    assert pq.read_table(pairs).num_rows == 192
    assert len(value["prototypes"]["pairs"]) == 10


def test_compare_prints_no_names_without_a_lens(prism, tiny_model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("lens"))
    result = prism("compare", bare, tiny_model, "--top", 1)
    assert result.returncode == 0, result.stderr
    assert "b name" in result.stdout
    assert "a name" not in result.stdout


def test_filters_and_methods_of_explain(prism, tiny_model):
    text = TEXTS[0]["text"]
    plain = json.loads(prism("explain", tiny_model, text, "--json").stdout)
    (first, *_) = plain["sources"]["items"]
    result = prism("explain", tiny_model, text, "--where", f"domain={first['key']}", "--json")
    value = json.loads(result.stdout)["sources"]
    assert value["items"] == [first]
    assert value["where"] == {"domain": [first["key"]]}
    total = first["share"] + value["elsewhere"] + value["unattributed"]
    assert total == pytest.approx(1, abs=1e-6)
    result = prism("explain", tiny_model, text, "--method", "source", "--json")
    measure = json.loads(result.stdout)["sources"]
    assert measure["method"] == "source"
    assert sum(i["share"] for i in measure["items"]) == pytest.approx(1, abs=1e-6)
    filtered = ("--where", f"domain={first['key']}", "--passages")
    human = prism("explain", tiny_model, text, *filtered)
    assert "elsewhere" in human.stdout


def test_explain_reads_files_of_texts(prism, tiny_model, texts, tmp_path):
    several = json.loads(prism("explain", tiny_model, "--file", texts, "--json").stdout)["texts"]
    lines = tmp_path / "lines.txt"
    lines.write_text("\n\n".join(row["text"] for row in TEXTS) + "\n", encoding="utf-8")
    page, table = tmp_path / "page.html", tmp_path / "t.parquet"
    outputs = ["--html", page, "--parquet", table, "--json"]
    result = prism("explain", tiny_model, "--file", lines, "--lines", *outputs)
    one_by_one = json.loads(result.stdout)["texts"]
    assert len(several) == len(one_by_one) == 3
    assert several[0] == one_by_one[0]
    assert several[0] == json.loads(prism("explain", tiny_model, TEXTS[0]["text"], "--json").stdout)
    (block,) = Reader(page.read_text(encoding="utf-8")).blocks
    assert len(block["answers"]) == 3
    assert set(pq.read_table(table)["text"].to_pylist()) == {0, 1, 2}


def test_input_that_cannot_be_used(refused, tiny_model, texts, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "whole"}\n{"text": "ha', encoding="utf-8")
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(b"PAR1 and no more")
    for arguments, words in (
        (["audit", tiny_model, tmp_path / "none.jsonl"], "does not exist"),
        (["audit", tiny_model, bad], "bad.jsonl:2 is not valid JSON"),
        (["audit", tiny_model, cut], "damaged or incomplete"),
        (["audit", tiny_model, texts, "--where", "licence=CC0"], "Did you mean 'license'"),
        (["audit", tiny_model, texts, "--where", "license"], "COLUMN=VALUE"),
        (["audit", tiny_model, texts, "--where", "license=none"], "no text of this lens has"),
        (["audit", tiny_model, texts, "--by", "sources"], "'source'"),
        (["audit", tiny_model, texts, "--csv", tmp_path], "is a directory"),
        (["audit", tiny_model, texts, "--csv", tmp_path / "a.txt"], "ends with .csv"),
        (["audit", tiny_model, texts, "--window", 10**6], "does not fit"),
        (["audit", tiny_model, texts, "--text-column", "words"], "no column 'words'"),
        (["sources", tiny_model, "--doc", "no such"], "has no document 'no such'"),
        (["sources", tiny_model, "--doc", "x", "--file", texts, "--audit", cut], "got both"),
        (["explain", tiny_model, "--file", texts, "--lines"], "leave out --lines"),
        (["explain", tiny_model, "x", "--method", "evidense"], "'evidence'"),
        (["compare", tiny_model, tmp_path], "not a prismlm model directory"),
        (
            ["compare", tiny_model, tiny_model, "--by", "document"],
            "not one of 'source', 'domain', 'license'",
        ),
    ):
        message = refused(*arguments)
        assert words in message, arguments
        assert not list(tmp_path.glob(".*"))
