"""A prototype head on every family, for every use of a model.

The parameters are the matrix of docs/families.md, which a run of all cells writes.
"""

import functools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.shared.matrix import FAMILIES
from tests.helpers import families, family_processes
from tests.helpers.families import COLUMNS, QUANTISED, REFUSED, TITLES
from tests.helpers.family_cells import CELLS, Family, refused
from tests.helpers.matrix import assert_published

HELPERS = Path(__file__).parents[2] / "tests" / "helpers"


def cell(family, column):
    # Without torchao in the tests' requirements; with new processes; with seconds of tracing.
    traced = column == "torch.export" and family != "llama"
    slow = family in QUANTISED or column == "accelerate launch" or traced
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(family, column, id=f"{family}-{column}", marks=marks)


@pytest.fixture(scope="module")
def family_of(small_corpus, tmp_path_factory):
    """A function that returns a family, and makes its model directory at the first call."""
    corpus = families.opened_corpus(small_corpus)

    @functools.cache
    def family(name):
        if name in QUANTISED:
            pytest.importorskip("torchao")
        directory = families.make_directory(name, corpus, tmp_path_factory.mktemp(name))
        return Family(name, directory, corpus)

    return family


@pytest.mark.parametrize(
    ("name", "column"), [cell(name, column) for name in TITLES for column in COLUMNS]
)
def test_cell(name, column, family_of, request, tmp_path, record_property):
    family = family_of(name)
    if name == REFUSED:
        note = refused(family, column)
    elif column == "accelerate launch":
        note = as_in_one_process(family, request.getfixturevalue("launched"))
    else:
        note = CELLS[column](family, tmp_path)
    record_property("cell", [name, column, note or ""])


@pytest.fixture(scope="module")
def launched(request, family_of, tmp_path_factory):
    """The results of two processes of ``accelerate launch`` for the families that are run."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "callspec", None)
        and item.callspec.params.get("column") == "accelerate launch"
    ]
    directory = tmp_path_factory.mktemp("launched")
    opened = [family_of(name) for name in names if name != REFUSED]
    torch.save(opened[0].rows(), directory / "rows.pt")
    words = [f"{family.name}={family.directory}" for family in opened]
    # --multi_gpu starts several processes without MPI; the script uses the CPU.
    start = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1"
    settings = "--mixed_precision no --dynamo_backend no --main_process_port 0"
    script = [HELPERS / "family_processes.py", directory, *words]
    command = [sys.executable, *start.split(), *settings.split(), *script]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((directory / f"rank-{rank}.pickle").read_bytes()) for rank in (0, 1)]


def as_in_one_process(family, launched):
    """Two processes have the loss and gradients of one that sees all rows."""
    results = [process[family.name] for process in launched]
    if family.name in QUANTISED:
        assert all("Int8Tensor dispatch" in found["error"] for found in results)
        return "refused: DistributedDataParallel cannot send torchao's int8 weights"
    alone = family_processes.both(family.directory)
    rows = family.rows()
    loss = alone(input_ids=rows, labels=rows).loss
    loss.backward()
    expected = family_processes.gradients(alone)
    assert {"prototype_head.prototypes", "prototype_head.log_scale"} <= expected.keys()
    tolerance = 2e-2 if family.low else 1e-4
    for found in results:
        assert "error" not in found, found["error"]
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=tolerance, atol=0)
        assert found["gradients"].keys() == expected.keys()
        for name, value in expected.items():
            error = (found["gradients"][name] - value).abs().max()
            assert error <= tolerance * value.abs().max(), name
    return None


def test_the_published_matrix_has_these_cells_and_no_others(pytestconfig):
    assert_published(pytestconfig, FAMILIES, TITLES, COLUMNS)
