import ast
import fcntl
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

# A hundred processes are started here. Where nothing is to be written beside the sources, what one
# has compiled is kept elsewhere: compiling PyTorch for each takes longer than the tests.
if sys.dont_write_bytecode:
    kept = Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(kept))
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Shapes at public boundaries are checked under pytest only: the hook comes before prismlm.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# One thread here and in every process started here: sums in one order, so that they compare equal.
os.environ["OMP_NUM_THREADS"] = "1"

from jaxtyping import _import_hook, install_import_hook
from jaxtyping import config as checks


class Boundaries(_import_hook.JaxtypingTransformer):
    """Leaves out functions within functions.

    They are no boundary, and made anew at every call: so would their checks be, which took a fifth
    of a pass through a model.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        return node if inside else super().visit_FunctionDef(node)


_import_hook.JaxtypingTransformer = Boundaries
# jaxtyping keeps what it compiled by this name: with the blank it is not what others have kept.
install_import_hook(["prismlm.ops", "prismlm.layers", "prismlm.models"], "beartype.beartype ")

import torch
from hypothesis import settings

settings.register_profile("prismlm", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("prismlm")
torch.set_num_threads(1)

from collections.abc import Callable, Iterator

import pytest

# What a helper asserts is shown with its values, as what a test asserts is.
pytest.register_assert_rewrite("tests.helpers")

Making = Callable[[Path], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-matrix",
        metavar="NAME",
        help="write the matrix of docs/ of that name after a run of all of its cells",
    )
    parser.addoption("--images", action="store_true", help="replace the pictures of docs/images")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As users run it: without the test run's checks of types, which would refuse it first."""
    checks.update("jaxtyping_disable", True)
    yield
    checks.update("jaxtyping_disable", False)


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what is in its background deaf to Ctrl-C, and tests send it to themselves.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The processes that tests are spread over report to the one that writes.
    name = config.getoption("--write-matrix")
    if name and not hasattr(config, "workerinput"):
        from tests.helpers.matrix import writer

        config.pluginmanager.register(writer(name))


def pytest_collection_finish() -> None:
    # Accelerate collects garbage at every run: what was imported is not looked through each time.
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A test that leaves more threads behind would change the last digits of those after it."""
    yield
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    assert left == 1, f"the test left PyTorch with {left} threads"


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Making) -> Path:
    """Return what was made in a directory that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    # Each process has a directory in that of the run, if there are several.
    shared = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "made-once" / name
    shared.parent.mkdir(exist_ok=True)
    with shared.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        noted = shared.with_suffix(".path")
        if not noted.is_file():
            # Half of it may be there from a process that failed.
            shutil.rmtree(shared, ignore_errors=True)
            shared.mkdir()
            noted.write_text(str(make(shared)))
        return Path(noted.read_text())


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus directory of some hundred documents of the bundled sample."""
    from tests.helpers.tiny import build_tiny_corpus

    return made_once(tmp_path_factory, "corpus", build_tiny_corpus)


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus directory of two dozen starts of documents, of 320 different tokens."""
    from tests.helpers.families import small_corpus

    return made_once(tmp_path_factory, "small-corpus", small_corpus)


@pytest.fixture(scope="session")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models named by their kinds, and pairs.parquet. Copy what is to be changed."""
    from tests.helpers.studied import make_studied

    return made_once(tmp_path_factory, "studied", make_studied)


@pytest.fixture(scope="session")
def tiny_model(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a head and a lens of `tiny_corpus`. Copy it to change it."""
    from prismlm.corpus import Corpus
    from tests.helpers.tiny import train_tiny_model

    def trained(directory: Path) -> Path:
        return train_tiny_model(Corpus.open(tiny_corpus), directory / "tiny")

    return made_once(tmp_path_factory, "model", trained)


@pytest.fixture(scope="session")
def short_corpus(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One in five documents of `tiny_corpus`, in the tokens of `tiny_model`."""
    from tests.helpers.tiny import build_small_corpus

    return made_once(tmp_path_factory, "short", lambda to: build_small_corpus(tiny_model, to))
