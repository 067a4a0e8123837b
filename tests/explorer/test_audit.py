"""Audits over real HTTP and in a browser, against Audit itself and the files of the command."""

import json

import pytest
from typer.testing import CliRunner

from prismlm.cli.app import app
from prismlm.corpus.documents import Document
from prismlm.explain.audit import Audit
from tests.explorer.conftest import Served, go, visited
from tests.helpers.running import assert_accessible, assert_fits_a_phone

LAW = "The court ruled that the contract was void and dismissed the appeal."
TEXTS = [
    {"id": "law", "text": LAW},
    {"id": "=1+1", "text": "The patient was given a dose of the drug, and then another one. " * 9},
    {"id": "none", "text": "xq zzv blorp kkj fnord \u202e<b>lmao</b> qwrt"},
]
KINDS = ("parquet", "jsonl", "csv", "html")


@pytest.fixture(scope="module")
def commanded(tiny_model, tmp_path_factory):
    """Files of every kind that a browser reads, and what the command writes of them, by kind."""
    rows = "\n".join(json.dumps(row) for row in TEXTS[:2]) + "\n\n" + json.dumps({"text": LAW})
    contents = {
        "a.txt": LAW + "\n\n",
        "b.md": "# Ein Titel\n\nMit 日本 und \u202e Zeichen. " * 5,
        "c.jsonl": rows + '\n{"text": "  "}\n',
        "d.json": json.dumps([TEXTS[2], {"text": LAW, "id": 7}]),
        "e.csv": 'id,title,text\r\ne1,x,"She said ""no"",\nand\r\nleft, again."\r\n,y,' + LAW,
    }
    folder = tmp_path_factory.mktemp("texts")
    for name, content in contents.items():
        (folder / name).write_bytes(content.encode())
    files, out = sorted(folder.iterdir()), tmp_path_factory.mktemp("commanded")
    options = [word for kind in KINDS for word in (f"--{kind}", str(out / f"audit.{kind}"))]
    result = CliRunner().invoke(app, ["audit", str(tiny_model), *map(str, files), *options])
    assert result.exit_code == 0, result.output
    return files, {kind: (out / f"audit.{kind}").read_bytes() for kind in KINDS}


def test_rows_and_sums_are_those_of_an_audit(served, lm):
    files = [{"name": "texts.jsonl", "content": "\n".join(map(json.dumps, TEXTS))}]
    (name, start), *sent, (_, end) = served.events("/api/audits", {"files": files})
    assert (name, start["texts"], {name for name, _ in sent}) == ("start", 3, {"row"})
    audit = Audit(lm)
    rows = list(audit.read(Document(text["id"], text["text"]) for text in TEXTS))
    for (_, data), row in zip(sent, rows, strict=True):
        assert (data["text_id"], data["support"]) == (row["text_id"], row["support"])
        assert data["unattributed"] == pytest.approx(row["unattributed"], rel=1e-5)
        assert [d["doc_id"] for d in data["documents"]] == [row["documents"][0]["doc_id"]]
    assert "‹U+202E›" in sent[2][1]["opening"]
    assert not end["stopped"]
    for by, group in end["summary"]["shares"].items():
        sources = audit.attribution().sources(by)
        for shown, item in zip(group["items"], sources.items, strict=True):
            assert shown["key"] == item.key
            assert shown["share"] == pytest.approx(item.share, rel=1e-5)
        assert group["unattributed"] == pytest.approx(sources.unattributed, rel=1e-5)
    assert "\r\n'=1+1," in served.text("GET", f"/api/audits/{end['id']}/report.csv")


def test_files_that_are_refused(served):
    for name, content, words in (
        ("../../a.txt", " ", "No documents: no text in ../../a.txt"),
        ("a.pdf", "One.", "a.pdf does not have a supported extension"),
        ("a.csv", "body\nOne.\n", "a.csv: there is no column 'text'; the columns are: body."),
        ("a.jsonl", '{"text": "One."}\n{"text": \n', "a.jsonl:2 is not valid JSON"),
        ("a.jsonl", '{"text": "One."}\n' * 1001, "more than 1,000 texts"),
        ("a.txt", "x" * 2_000_001, "2,000,001 characters"),
    ):
        files = [{"name": name, "content": content}]
        error = served.refused("POST", "/api/audits", {"files": files})
        assert words in error
        assert "/tmp" not in error


def audit_files(page, files):
    go(page, "audit")
    page.wait_for_selector(".x-drop")
    page.set_input_files(".x-files", files)
    page.click(".x-audit .x-go")


def test_in_a_browser_files_give_the_files_of_the_command(page, commanded, tmp_path):
    files, written = commanded
    audit_files(page, files)
    page.wait_for_selector(".x-audit-figures")
    assert_accessible(page)
    assert "e.csv --html report.html" in page.inner_text(".x-command")
    for kind, label in zip(KINDS, ("Parquet", "JSON lines", "CSV", "HTML"), strict=True):
        with page.expect_download() as download:
            page.click(f".x-exports >> text='{label}'")
        assert download.value.suggested_filename == f"audit.{kind}"
        download.value.save_as(tmp_path / kind)
        assert (tmp_path / kind).read_bytes() == written[kind], kind
    rows = list(map(json.loads, written["jsonl"].splitlines()))
    assert len(rows) == 9
    shown = page.locator(".x-text-table tbody tr")
    # What is only the beginning of a text says so.
    openings = shown.locator("td:first-child > bdi").all_inner_texts()
    ends = [opening.endswith("…") for opening in openings]
    assert ends == [len(row["opening"]) == 120 for row in rows]
    assert set(ends) == {True, False}
    page.select_option(".x-order", "support")
    scores = list(map(float, shown.locator("td:nth-child(4) small").all_inner_texts()))
    assert scores == pytest.approx(sorted(row["support_score"] for row in rows), abs=0.006)
    assert page.locator(".x-audit b >> text=lmao").count() == 0
    assert_fits_a_phone(page)
    # From a document that the texts lean on to the place in the corpus.
    page.locator(".p-documents cite a").first.click()
    page.wait_for_selector("#place")


@pytest.mark.usefixtures("slow_model")
def test_in_a_browser_a_held_out_text_is_tried_and_dropped_texts_can_be_stopped(page, served):
    texts = served.json("GET", "/api/model")["texts"]
    go(page, "audit")
    buttons = page.locator(".x-audit .x-examples button")
    buttons.first.wait_for()
    assert_accessible(page)
    assert buttons.all_inner_texts() == list(texts)
    buttons.last.click()
    assert page.input_value(".x-audit .x-prompt") == list(texts.values())[-1]
    page.click(".x-audit .x-go")
    page.wait_for_selector(".x-audit-figures")
    rows = page.locator(".x-text-table tbody tr")
    assert rows.count() == 1
    page.fill(".x-audit .x-prompt", "")
    page.evaluate(
        """text => {
          const held = new DataTransfer();
          const rows = Array.from({ length: 300 }, (_, i) => JSON.stringify({ id: i, text }));
          held.items.add(new File([rows.join("\\n")], "many.jsonl"));
          const options = { dataTransfer: held, bubbles: true, cancelable: true };
          document.querySelector(".x-drop").dispatchEvent(new DragEvent("drop", options));
        }""",
        TEXTS[1]["text"],
    )
    rows.first.wait_for()
    page.click(".x-audit .x-stop")
    page.wait_for_selector(".x-stopped >> text=of 300 texts")
    assert 0 < rows.count() < 300
    assert page.locator(".x-exports a").count() == 4


def test_in_a_browser_what_cannot_be_audited_is_reported(lm, browser, tmp_path):
    posts = []
    with Served(lm, audited=1000) as server, visited(browser, server) as page:
        page.on("request", lambda request: request.method == "POST" and posts.append(request.url))
        for name, content, words, sent in (
            ("large.txt", b"word " * 900, "large.txt has 4,500 bytes: 1,000 characters", 0),
            ("rows.csv", b"body\nOne.\n", "rows.csv: there is no column 'text'", 1),
        ):
            (tmp_path / name).write_bytes(content)
            audit_files(page, [tmp_path / name])
            page.wait_for_selector(f".x-audit .x-problem >> text={words}")
            assert len(posts) == sent
