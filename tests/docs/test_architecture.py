"""The page of the architecture says what the code and the rules of imports say."""

import itertools
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import grimp
import networkx as nx

import prismlm
from prismlm.cli.explain import explain
from prismlm.cli.train import train

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_picture_is_of_the_imports():
    picture = re.search(r"flowchart TD\n(.*?)```", PAGE, re.DOTALL)[1]
    packages = {path.parent.name for path in (ROOT / "src" / "prismlm").glob("*/__init__.py")}
    graph = grimp.build_graph("prismlm", exclude_type_checking_imports=True, cache_dir=None)
    imports = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            imports.add(tuple(f"{name}.".split(".")[1] for name in (importer, imported)))
    imports = {
        (importer, imported if imported in packages else "single")
        for importer, imported in imports
        if importer in packages and importer != imported
    }
    drawn = nx.DiGraph()
    for line in picture.splitlines():
        steps = [re.findall(r"\w+", step) for step in re.sub(r"\[.*\]", "", line).split("-->")]
        for pair in itertools.pairwise(steps):
            drawn.add_edges_from(itertools.product(*pair))
    assert set(drawn) == packages | {"single"}
    assert set(drawn.edges) <= imports
    # An arrow stands for all below it; the one exception is told in the text.
    reached = set(nx.transitive_closure(drawn).edges)
    assert imports - reached == {("explain", "pages")}


def test_the_table_and_the_exceptions_are_those_of_the_import_rules():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    cells = re.findall(r"^\| (`.*?) \|", section("What may import what"), re.MULTILINE)
    rules = next(c["layers"] for c in contracts if c["type"] == "layers")
    # A layer in brackets may be missing.
    there = [r for r in rules if r[0] != "(" or (ROOT / "src" / "prismlm" / r.strip("()")).exists()]
    listed = [re.findall(r"`(\w+)`", cell) for cell in cells]
    assert listed == [row.strip("()").split(" | ") for row in there]
    allowed = {line for c in contracts for line in c.get("ignore_imports", [])}
    assert set(re.findall(r"`([\w.]+ -> [\w.]+)`", PAGE)) == allowed


def test_the_files_to_touch_exist():
    table = section("Where to add something")
    paths = re.findall(r"`([a-z_]+/[\w/]+\.py)`", table)
    assert len(paths) >= 10
    for path in paths:
        written = ROOT / "src" / "prismlm" / path
        place = written.parent if written.stem == "NAME" else written
        assert place.exists(), f"docs/architecture.md names {path}"


def entered_by(run):
    """Return the files of the package that a call enters, in order."""
    package, entered = f"{Path(prismlm.__file__).parent}{os.sep}", {}

    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            entered.setdefault(Path(file.removeprefix(package)).as_posix())

    # Once before, so that nothing is imported or opened on the way.
    run("before")
    sys.setprofile(note)
    try:
        run("again")
    finally:
        sys.setprofile(None)
    return list(entered)


def assert_entered(title, run):
    """A call enters the files of the package that a section numbers, in order."""
    stations = re.findall(r"^\d+\. `([\w/]+\.py)`", section(title), re.MULTILINE)
    assert 5 <= len(stations) <= 10
    assert [file for file in entered_by(run) if file in stations] == stations


def test_the_way_of_explain_is_entered_station_by_station(tiny_model):
    assert_entered("How explain runs", lambda _: explain(tiny_model, "Once upon a time"))


def test_an_answer_with_its_documents_enters_few_files(lm):
    def answer(_):
        trace = lm.explain("Once upon a time", generate=3)
        assert trace.documents(3)
        assert trace.sources("domain").items
        assert trace.summary

    assert len(entered_by(answer)) <= 20


def test_the_way_of_train_is_entered_station_by_station(tiny_corpus, tmp_path):
    settings = {
        "corpus": str(tiny_corpus),
        "model": {"preset": "llama-tiny", "num_hidden_layers": 1},
        "head": {"prototypes": 16, "prototypes_per_token": 2, "initialise_at_step": 1},
        "data": {"length": 16},
        "batch_size": 2,
        "evaluation": {"tokens": 50, "final_tokens": 50},
        "logging": {"tensorboard": False},
        "steps": 2,
    }

    def run(name):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(json.dumps(settings | {"out": str(tmp_path / name)}))
        train(recipe)

    assert_entered("How train runs", run)
