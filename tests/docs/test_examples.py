"""The examples of the README, the docs and the notebooks run as they stand."""

import ast
import contextlib
import io
import json
import pkgutil
import re
import shlex
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.attribution.asked import questions
from prismlm.cli.app import app
from prismlm.corpus import sample_path
from prismlm.demo.fetched import Unreachable, run_fetched
from prismlm.demo.texts import pairs_path, plain_texts
from tests.helpers.chats import chatting

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


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


def test_every_link_leads_somewhere():
    texts = [(page, page.read_text(encoding="utf-8")) for page in PAGES]
    texts += [(path, text) for path in NOTEBOOKS for text in cells(path, "markdown")]
    for page, text in texts:
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


# -- notebooks


def cells(path, kind):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def shown(source, names):
    """Run a cell; return what its last line shows, if that is an expression."""
    tree = ast.parse(re.sub(r"^%.*$", "", source, flags=re.M))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    html = getattr(value, "_repr_html_", None)
    return (html() if html else None) or repr(value)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("workplace", "few_texts")
def test_a_notebook_runs(path, capsys):
    """With models of a few steps in the place of its own."""
    names = {}
    for source in cells(path, "code"):
        found = shown(re.sub(r"^STEPS = \d+$", "STEPS = 2", source, flags=re.M), names)
        # Every cell but those that only prepare shows something.
        assert found or capsys.readouterr().out or "import" in source, source


def test_there_is_one_for_each_idea_whose_outputs_are_right():
    ideas = {"prototype_head", "prototype_mixer", "signal_noise_attention", "uncertainty_feedback"}
    assert {path.stem for path in NOTEBOOKS} == ideas
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert '"output_type": "error"' not in text
        assert Path.home().as_posix() not in text


# -- the README


def test_what_readme_says_of_the_demo_is_what_ships(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    taught = pq.read_table(pairs_path())["split"].to_pylist().count("train")
    plain = pq.read_table(plain_texts(tmp_path / "plain.parquet")).num_rows
    assert f"{taught:,} questions and answers of MedQuAD and {plain} other texts" in text
    reported, chosen_on = (len(questions(half)) for half in ("report", "choose"))
    assert f"[{reported} questions](docs/results/asked.md)" in text
    assert f"[{reported + chosen_on} questions asked](docs/results/asked.md)" in text
    assert text.count("\n") < 150


@pytest.mark.slow
def test_the_example_is_what_the_command_prints(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    command, shown = re.findall(r"```\n\$ prismlm (explain [^\n]*)\n(.*?)```", text, re.DOTALL)[0]
    with contextlib.chdir(tmp_path):
        try:
            run_fetched(Path("prismlm-demo"))
        except Unreachable as error:
            pytest.skip(str(error))
        printed = CliRunner().invoke(app, shlex.split(command)).stdout.splitlines()
    wanted = [line.strip() for line in shown.splitlines() if line.strip()]
    assert len(wanted) > 8
    # Wherever lines break on this terminal.
    flat = " ".join(" ".join(printed).split())
    assert " ".join(" ".join(wanted).split()) in flat
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(code, {})
    assert said.getvalue().splitlines() == re.findall(r"^# (.*)$", code, re.MULTILINE)
