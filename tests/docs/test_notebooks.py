"""The notebooks run from top to bottom, with models of a few steps in the place of theirs."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.docs.test_examples import ROOT
from tests.docs.test_examples import few_texts as few_texts
from tests.docs.test_examples import workplace as workplace

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
STEPS = 2


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
    names = {}
    for source in cells(path, "code"):
        found = shown(re.sub(r"^STEPS = \d+$", f"STEPS = {STEPS}", source, flags=re.M), names)
        # Every cell but those that only prepare shows something.
        assert found or capsys.readouterr().out or "import" in source, source


def test_there_is_one_for_each_idea_whose_links_and_outputs_are_right():
    ideas = {"prototype_head", "prototype_mixer", "signal_noise_attention", "uncertainty_feedback"}
    assert {path.stem for path in NOTEBOOKS} == ideas
    for path in NOTEBOOKS:
        for text in cells(path, "markdown"):
            for target in re.findall(r"\]\(([^)#]+)\)", text):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
        text = path.read_text(encoding="utf-8")
        assert '"output_type": "error"' not in text
        assert Path.home().as_posix() not in text
