"""The Python examples of the README and the docs run as they stand."""

import pkgutil
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from prismlm.corpus import sample_path
from tests.helpers.chats import chatting

ROOT = Path(__file__).parents[2]


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def workplace(tiny_model, short_corpus, tmp_path, monkeypatch):
    """A directory with what the examples name: a demo, a corpus and the recipes."""
    (tmp_path / "prismlm-demo").mkdir()
    chatting(tiny_model, tmp_path / "prismlm-demo" / "model")
    (tmp_path / "my-corpus").symlink_to(short_corpus)
    (tmp_path / "my-checkpoint").symlink_to(tiny_model)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(pq.read_table(sample_path())["text"].to_pylist()[:150:5]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text[:300], encoding="utf-8")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    # Its prototypes, rows and text to measure on take longer than all other examples together.
    recipe = tmp_path / "recipes" / "laptop.yaml"
    text = recipe.read_text(encoding="utf-8")
    sizes = ("prototypes: 2048 ", "prototypes: 256 "), ("\n  length: 256 ", "\n  length: 64 ")
    for long, short in (*sizes, ("100000", "5000")):
        assert text.count(long) == 1
        text = text.replace(long, short)
    recipe.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def few_texts(tmp_path, monkeypatch):
    """Some texts of the sample: pages read some of them, and none of how many there are."""
    table = pq.read_table(sample_path())
    texts = tmp_path / "texts.parquet"
    pq.write_table(table.take(list(range(0, len(table), 16))), texts)
    monkeypatch.setattr("prismlm.corpus.sample_path", lambda: texts)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Those on corpora follow from each other; two pages talk to a server.
ELSEWHERE = ("corpus", "hub", "serving")
EXAMPLES = [p for p in PAGES if "```python" in p.read_text() and p.stem not in ELSEWHERE]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.stem)
def test_examples_run(page, workplace, capsys):
    for block in python_blocks(page):
        exec(block, {})
    assert capsys.readouterr().out.strip()


@pytest.mark.usefixtures("few_texts")
def test_examples_of_the_page_on_corpora_run_one_after_the_other(tmp_path, monkeypatch):
    pytest.importorskip("datatrove")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in python_blocks("docs/corpus.md"):
        exec(block, names)
    assert names["six_tokens"] in names["text"]
    piped = names["Corpus"].open("piped")
    assert [len(piped.text(n)) > 40 for n in range(len(piped.doc_ids))] == [True] * 14


def test_every_name_of_the_pages_is_in_the_package():
    for page in PAGES:
        for name in set(re.findall(r"\bprismlm(?:\.\w+)+", page.read_text(encoding="utf-8"))):
            if name != "prismlm.json":
                assert pkgutil.resolve_name(name), f"{page.name} names {name}"


def test_every_link_of_the_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
