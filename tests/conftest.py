import ast
import fcntl
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

# Tests start a hundred processes, and compiling PyTorch in each takes longer than the tests: if
# bytecode is not written to the source tree, it is cached elsewhere.
if sys.dont_write_bytecode:
    cache = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(cache))
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread in all processes: sums have one order, so that they compare equal.
os.environ["OMP_NUM_THREADS"] = "1"

from jaxtyping import _import_hook, install_import_hook
from jaxtyping import config as checks


class Boundaries(_import_hook.JaxtypingTransformer):
    """Leaves out inner functions, whose checks at every call took a fifth of a pass."""

    def visit_FunctionDef(self, node):
        inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        return node if inside else super().visit_FunctionDef(node)


_import_hook.JaxtypingTransformer = Boundaries
# Shapes at public boundaries are checked under pytest only, by a hook before prismlm is imported.
# The blank gives a bytecode cache of our own: jaxtyping names it by this string.
install_import_hook(["prismlm.ops", "prismlm.layers", "prismlm.models"], "beartype.beartype ")

import torch
from hypothesis import settings

settings.register_profile("prismlm", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("prismlm")
torch.set_num_threads(1)

from functools import partial
from importlib import import_module

import pytest

from prismlm.parts import ENGINES

# Failed assertions of helpers show their values too.
pytest.register_assert_rewrite("tests.helpers")


def pytest_addoption(parser):
    parser.addoption("--images", action="store_true", help="replace the pictures of docs/images")


@pytest.fixture
def unchecked():
    """Switch off checks of types and shapes, as for users."""
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


def pytest_configure(config):
    # Processes in the background of a shell ignore Ctrl-C, which tests send to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    # Accelerate collects garbage at every run; imported modules need not be scanned each time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread():
    """Reset the number of threads, which changes last digits of later tests."""
    yield
    torch.set_num_threads(1)


def made_once(tmp_path_factory, name, make):
    """Return what ``make`` writes, once, in a directory that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    # With several processes, each has a directory in that of the run.
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "made-once" / name
    shared.parent.mkdir(exist_ok=True)
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        noted = shared.with_suffix(".path")
        if not noted.is_file():
            # A process that failed may have left a part of it.
            shutil.rmtree(shared, ignore_errors=True)
            shared.mkdir()
            noted.write_text(str(make(shared)))
        return Path(noted.read_text())


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """Each engine of workers that is installed."""
    if request.param != "local":
        pytest.importorskip(request.param)
    # On a busy machine Ray's workers, of lower priority by default, start too late.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    return request.param


def made_by(module, function, *needed):
    """Return a session fixture: what a helper makes of other fixtures, once."""

    @pytest.fixture(scope="session")
    def fixture(request, tmp_path_factory):
        others = [request.getfixturevalue(name) for name in needed]
        make = getattr(import_module(f"tests.helpers.{module}"), function)
        return made_once(tmp_path_factory, function, partial(make, *others))

    return fixture


# A corpus directory of some hundred documents of the bundled sample.
tiny_corpus = made_by("tiny", "build_tiny_corpus")
# A model directory with a head and a lens of `tiny_corpus`. Copy it to change it.
tiny_model = made_by("tiny", "train_tiny_model", "tiny_corpus")
# One in five documents of `tiny_corpus`, in the tokens of `tiny_model`.
short_corpus = made_by("tiny", "build_small_corpus", "tiny_model")
# A corpus directory of two dozen starts of documents, of 320 different tokens.
small_corpus = made_by("families", "small_corpus")
# Tiny models named by their kinds, and pairs.parquet. Copy what is to be changed.
studied = made_by("mixer_models", "make_studied")


@pytest.fixture(scope="module")
def lm(tiny_model):
    """The model of `tiny_model`, opened for each file: tests may change it."""
    import prismlm

    return prismlm.load(tiny_model)
