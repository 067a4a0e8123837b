"""Uncertainty feedback on every family, for every use of a model.

The parameters are the matrix of docs/uncertainty_feedback.md, which a run of all cells writes:

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

from benchmarks.shared.matrix import UNCERTAINTY
from tests.helpers import forked
from tests.helpers.feedback_calls import gradients
from tests.helpers.feedback_cells import CELLS
from tests.helpers.feedback_families import COLUMNS, TITLES
from tests.helpers.feedback_processes import ROWS, step_of, trained
from tests.helpers.matrix import assert_published

HELPERS = Path(__file__).parents[1] / "helpers"


def cell(family, column):
    # Tracing takes 15 seconds per family.
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
    """The results of every family's step in DDP and FSDP2, from two processes."""
    directory = tmp_path_factory.mktemp("processes")
    done = forked.run_script(HELPERS / "feedback_processes.py", directory)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((directory / f"rank-{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """The results of a process that compiles the families whose cells are run."""
    families = [
        item.callspec.params["family"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("column") == "compile"
    ]
    path = tmp_path_factory.mktemp("compiled") / "results.json"
    # The cells test tracing; other backends take minutes.
    done = forked.run_script(HELPERS / "feedback_compiled.py", path, "eager", *families)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def as_in_one_process(family, column, processes):
    """Two processes have the loss, gradients and codes of one that sees all rows."""
    fed = trained(family)
    loss, codes = step_of(fed, list(range(ROWS)))
    expected = gradients(fed.model)
    results = [result[column, family] for result in processes]
    for found in results:
        assert "error" not in found, found["error"]
        torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["gradients"], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(found["seen"], fed.feedback.embedding.seen)
    assert torch.equal(torch.cat([found["codes"] for found in results]), codes)
    assert not torch.equal(results[0]["codes"], results[1]["codes"])


def compiled_as_eager(family, compiled):
    result = compiled[family]
    assert "error" not in result, result["error"]
    notes = []
    if result["training"]:
        plain = result["training without feedback"]
        notes.append(
            f"a training step of two passes breaks its graph {result['training']} times, "
            f"one without feedback {plain}"
        )
    if result["decoding"]:
        notes.append(f"decoding breaks the graph {result['decoding']} times")
    return "; ".join(notes)


@pytest.mark.slow
def test_the_default_backend_gives_the_same(tmp_path):
    families, path = ("llama", "gpt2", "mamba"), tmp_path / "results.json"
    command = [sys.executable, str(HELPERS / "feedback_compiled.py"), path, "inductor", *families]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text(encoding="utf-8"))
    assert not {name: results[name]["error"] for name in families if "error" in results[name]}


@pytest.mark.slow
def test_nan_logits_stop_a_compiled_model(compiled):
    assert "entropy is not a number" in compiled["not a number"]


def test_the_published_matrix_has_these_cells_and_no_others(pytestconfig):
    assert_published(pytestconfig, UNCERTAINTY, TITLES, COLUMNS)
