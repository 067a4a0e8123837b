"""Uncertainty feedback on every family, in everything that a model is used for.

The parametrisation is the matrix of docs/uncertainty_feedback.md, which a run of all cells writes:

    pytest -n 0 -m "" --write-matrix uncertainty
        tests/models/test_uncertainty_feedback_matrix.py
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.uncertainty_feedback.render_matrix import MATRIX
from tests.helpers import forked
from tests.helpers.feedback_calls import gradients
from tests.helpers.feedback_cells import CELLS
from tests.helpers.feedback_families import COLUMNS, TITLES
from tests.helpers.feedback_processes import ROWS, step_of, trained
from tests.helpers.matrix import assert_published

HELPERS = Path(__file__).parents[1] / "helpers"


def cell(family, column):
    # Tracing takes a quarter of a minute for each.
    marks = [pytest.mark.slow] if column == "compile" else []
    return pytest.param(family, column, id=f"{family}-{column}", marks=marks)


@pytest.mark.parametrize(
    ("family", "column"), [cell(family, column) for family in TITLES for column in COLUMNS]
)
def test_cell(family, column, request, tmp_path, record_property):
    if column == "compile":
        note = compiled_as_eager(family, request.getfixturevalue("compiled"))
    elif column in ("DDP", "FSDP2"):
        note = as_in_one_process(family, column, request.getfixturevalue("processes"))
    else:
        note = CELLS[column](family, tmp_path)
    record_property("cell", [family, column, note or ""])


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Every family's step in DDP and in FSDP2, in one start of two processes."""
    directory = tmp_path_factory.mktemp("processes")
    done = forked.run_script(HELPERS / "feedback_processes.py", directory)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((directory / f"rank-{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """What the process that compiles says of the families whose cells are run."""
    asked = [
        item.callspec.params["family"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("column") == "compile"
    ]
    path = tmp_path_factory.mktemp("compiled") / "results.json"
    # Tracing is what the cells test; the other backends take minutes.
    done = forked.run_script(HELPERS / "feedback_compiled.py", path, "eager", *asked)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def as_in_one_process(family, column, processes):
    """Two processes have the loss and gradients of one that sees all rows, and its codes."""
    fed = trained(family)
    loss, codes = step_of(fed, list(range(ROWS)))
    expected = gradients(fed.model)
    results = [result[column, family] for result in processes]
    for found in results:
        assert "error" not in found, found["error"]
        torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=1e-6)
        assert found["gradients"].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found["gradients"][name], value, rtol=1e-4, atol=1e-5, msg=name
            )
        assert torch.equal(found["seen"], fed.feedback.embedding.seen)
    assert torch.equal(torch.cat([found["codes"] for found in results]), codes)
    assert not torch.equal(results[0]["codes"], results[1]["codes"])


def compiled_as_eager(family, compiled):
    found = compiled[family]
    assert "error" not in found, found["error"]
    said = []
    if found["training"]:
        plain = found["training without feedback"]
        said.append(
            f"a training step of two passes breaks its graph {found['training']} times, "
            f"one without feedback {plain}"
        )
    if found["decoding"]:
        said.append(f"decoding breaks the graph {found['decoding']} times")
    return "; ".join(said)


@pytest.mark.slow
def test_the_default_backend_gives_the_same(tmp_path):
    families = ("llama", "gpt2", "mamba")
    command = [sys.executable, str(HELPERS / "feedback_compiled.py"), tmp_path / "results.json"]
    done = subprocess.run([*command, "inductor", *families], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert set(families) <= set(found)
    assert not {name: found[name]["error"] for name in families if "error" in found[name]}


@pytest.mark.slow
def test_logits_that_are_not_numbers_stop_a_compiled_model(compiled):
    assert "entropy is not a number" in compiled["not a number"]


def test_the_published_matrix_has_these_cells_and_no_others(pytestconfig):
    assert_published(pytestconfig, MATRIX, TITLES, COLUMNS)
