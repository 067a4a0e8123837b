from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prismlm.corpus import Corpus

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    rows = [{"id": f"d{n}", "text": f"text number {n} " * 50, "domain": "d"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_build_then_info_as_json(prism: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    built = prism("corpus", "build", texts, "--out", out, "--vocab-size", 300, "--json")
    assert built.returncode == 0, built.stderr
    summary = json.loads(built.stdout)
    corpus = Corpus.open(out)
    assert summary["fingerprint"] == corpus.fingerprint
    assert summary["counts"]["documents"] == 40
    assert "Tokenising" in built.stderr
    info = prism("corpus", "info", out, "--json")
    assert json.loads(info.stdout) == summary
    assert info.stderr == ""


def test_build_for_people(cold_prism: Run, prism: Run, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "texts.jsonl").symlink_to(texts)
    (tmp_path / "in" / "scan.pdf").write_bytes(b"x")
    named = [texts, tmp_path / "in"]
    built = cold_prism("corpus", "build", *named, "--out", tmp_path / "out", "--vocab-size", 300)
    assert built.returncode == 0, built.stderr
    said = " ".join(built.stdout.split())
    for part in ("documents 40", "files read 1", "named again and read once 1", "(.pdf 1)"):
        assert part in said
    assert "100.0%" in built.stdout
    assert built.stdout == prism("corpus", "info", tmp_path / "out").stdout


def test_dry_run_writes_nothing(prism: Run, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    estimate = prism("corpus", "build", texts, "--out", out, "--dry-run", "--json")
    assert json.loads(estimate.stdout)["documents"] == 40
    assert (
        "Nothing was written" in prism("corpus", "build", texts, "--out", out, "--dry-run").stdout
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.jsonl"]


def test_the_word_sample_is_the_bundled_sample(prism: Run, tmp_path: Path) -> None:
    result = prism("corpus", "build", "sample", "--out", tmp_path / "out", "--dry-run", "--json")
    assert json.loads(result.stdout)["documents"] > 3000


def test_every_column_can_be_named(prism: Run, tmp_path: Path) -> None:
    names = ["id", "text", "source", "domain", "license", "title", "url"]
    values = {name: f"the {name}" for name in names} | {"split": "test"}
    pq.write_table(
        pa.table({f"my_{name}": [value] for name, value in values.items()}), tmp_path / "t.parquet"
    )
    options = [word for name in values for word in (f"--{name}-column", f"my_{name}")]
    out = tmp_path / "out"
    result = prism("corpus", "build", tmp_path / "t.parquet", "--out", out, *options)
    assert result.returncode == 0, result.stderr
    corpus = Corpus.open(out)
    assert corpus.text(0) == "the text"
    for name in names[2:]:
        assert corpus.column(name) == [f"the {name}"]
    assert corpus.doc_ids == ["the id"]
    assert corpus.split("heldout").tolist() == [0]
    assert "by their own split (train 0, heldout 1)" in " ".join(result.stdout.split())


BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "latin1 text": ("t.txt", b"caf\xe9", "t.txt is not UTF-8"),
    "latin1 json": ("t.jsonl", b'{"text": "caf\xe9"}', "t.jsonl:1 is not UTF-8"),
    "broken json": ("t.jsonl", b'{"text": "a"}\n{"text"', "t.jsonl:2 is not valid JSON"),
    "text is a number": ("t.jsonl", b'{"text": 1}', "t.jsonl:1: the text is a number"),
    "other column": ("t.jsonl", b'{"txt": "a"}', "Did you mean 'txt'?"),
    "cut gzip": ("t.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-4], "is damaged"),
    "not zstd": ("t.jsonl.zst", b"no", "is damaged"),
    "not parquet": ("t.parquet", b"no", "is damaged"),
    "only spaces": ("t.txt", b" \n", "No documents"),
    "unknown kind": ("t.docx", b"a", "does not have a supported extension"),
    "same id": (
        "t.jsonl",
        b'{"id": "x", "text": "a"}\n{"id": "x", "text": "b"}',
        "t.jsonl:2: another document has the id 'x'",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(refused: Callable[..., str], case: str, tmp_path: Path) -> None:
    name, data, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(data)
    assert message in refused("corpus", "build", tmp_path / name, "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_arguments(
    prism: Run, refused: Callable[..., str], texts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build = ("corpus", "build", texts, "--out", out)
    assert "'nope'" in refused(*build, "--id-column", "nope")
    assert "No tokenizer could be loaded" in refused(*build, "--tokenizer", tmp_path)
    assert "below 1" in refused(*build, "--heldout", 2)
    assert prism(*build, "--vocab-size", 300).returncode == 0
    assert "--overwrite" in refused("corpus", "build", texts, "--out", out)
    assert "not a corpus" in refused("corpus", "build", texts, "--out", tmp_path, "--overwrite")
    (out / "tokens-00000.bin").write_bytes(b"")
    assert "tokens-00000.bin has 0 bytes" in refused("corpus", "info", out)
    assert prism(*build, "--vocab-size", 300, "--overwrite").returncode == 0
