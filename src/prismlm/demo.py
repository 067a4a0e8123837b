"""The demo: from the bundled texts to a trained model, its index, and one prompt per domain."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.errors import InputError
from prismlm.files import atomic_file, read_json, write_json
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from prismlm.training import Recipe

STATE_FILE = "demo.json"
REPORT_FILE = "report.html"
GENERATED = 12
TEMPERATURE = 0.5

PROMPTS = {
    "biology": "The expression of these genes in cells",
    "children": "Once upon a time there was a little",
    "computer science": "We propose a neural network that",
    "fiction": "He looked at her for a moment, and then said",
    "finance": "The Federal Reserve expects that inflation",
    "government": "Federal agencies can use this website to",
    "history": "After the war, the American colonists",
    "law": "The applicant submitted that the decision of the Tribunal",
    "mathematics": "We prove that the number of solutions of the equation",
    "medicine": "The symptoms of this disease in patients include",
    "physics": "We measure the magnetic field and the energy of the electron",
    "software": "This function returns a pointer to the",
}


@dataclass(frozen=True)
class DemoSize:
    """How much the demo builds.

    Attributes:
        recipe: its training recipe, in the package.
        vocab_size: tokens of its tokenizer.
        every: one in so many documents of the bundled sample is read.
        contexts: places kept per prototype.
        overrides: ``a.b=value`` on top of the recipe.
    """

    recipe: str
    vocab_size: int
    every: int
    contexts: int
    overrides: tuple[str, ...] = ()


FULL = DemoSize("demo.yaml", vocab_size=4096, every=1, contexts=32)
QUICK = DemoSize("demo-quick.yaml", vocab_size=2048, every=4, contexts=16)


@dataclass(frozen=True)
class DemoResult:
    """Where everything is.

    Attributes:
        model: the model directory.
        corpus: the corpus directory.
        report: the page with every explanation.
        traces: the explanation of each domain's prompt.
        cached: whether all of it was there already.
    """

    model: Path
    corpus: Path
    report: Path
    traces: dict[str, prismlm.Trace]
    cached: bool


def run_demo(out: Path, size: DemoSize = FULL, *, progress: Reporter = SILENT) -> DemoResult:
    """Build what is not there yet: corpus, model, lens and report; then explain the prompts.

    Every part is complete or absent: stopped anywhere, the demo goes on from the last whole part,
    training from its last checkpoint.

    Args:
        out: where to build; a directory that the demo made, or a new one.
        size: FULL, or QUICK: a smaller model on a quarter of the documents.
        progress: shows what is under way.

    Raises:
        InputError: ``out`` holds something else, or a demo of another size or version.
    """
    out = Path(out)
    _claim(out, size)
    corpus, model = out / "corpus", out / "model"
    there = parts_there(out)
    if not there["corpus"]:
        _build_corpus(corpus, out, size, progress)
    if not there["model"]:
        _train(corpus, model, size, progress)
    if not there["lens"]:
        _index(corpus, model, model / "lens" / "sample", size, progress)
    traces = _explain(model, progress)
    report = out / REPORT_FILE
    from prismlm.pages.frame import write_page
    from prismlm.pages.trace import page

    write_page(page(list(traces.values()), title="prismlm demo"), report)
    return DemoResult(model, corpus, report, traces, cached=all(there.values()))


def recipe_text(size: DemoSize) -> str:
    """Return the training recipe of a demo size."""
    return files("prismlm.training").joinpath("recipes", size.recipe).read_text(encoding="utf-8")


def parts_there(out: Path) -> dict[str, bool]:
    """Say of corpus, model and lens whether each is there; what is there is whole."""
    from prismlm.models.sidecar import has_sidecar

    model = out / "model"
    return {
        "corpus": (out / "corpus" / "corpus.json").exists(),
        "model": has_sidecar(model),
        "lens": (model / "lens" / "sample").exists(),
    }


def _claim(out: Path, size: DemoSize) -> None:
    """Note whose directory this is, or check that the note is ours."""
    if check_claim(out, size):
        write_json(out / STATE_FILE, _identity(size))


def check_claim(out: Path, size: DemoSize) -> bool:
    """Check that a demo may be built in a directory; return whether nobody has begun one there.

    Raises:
        InputError: it holds something else, or a demo of another size or version.
    """
    state = out / STATE_FILE
    if not state.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} exists and no demo made it. Choose another --out.")
        return True
    if read_json(state) != _identity(size):
        raise InputError(
            f"{out} holds a demo of another size or version of prismlm. "
            "Choose another --out, or remove it."
        )
    return False


def _identity(size: DemoSize) -> dict[str, Any]:
    from prismlm.corpus import sample_path

    return {
        "prismlm": prismlm.__version__,
        "size": size.recipe.removesuffix(".yaml"),
        "inputs": fingerprints.of_bytes(
            recipe_text(size).encode(), sample_path().read_bytes(), repr(size).encode()
        ),
    }


def documents(path: Path, every: int) -> Path:
    """Return the bundled sample, or write one in ``every`` of its documents to ``path``."""
    from prismlm.corpus import sample_path

    if every == 1:
        return sample_path()
    table = pq.read_table(sample_path())
    with atomic_file(path) as temporary:
        pq.write_table(table.take(list(range(0, len(table), every))), temporary)
    return path


def _build_corpus(corpus: Path, out: Path, size: DemoSize, progress: Reporter) -> None:
    from prismlm.corpus import build_corpus

    source = documents(out / "documents.parquet", size.every)
    build_corpus([source], corpus, vocab_size=size.vocab_size, progress=progress)


def _train(corpus: Path, model: Path, size: DemoSize, progress: Reporter) -> None:
    from prismlm.training import train

    train(recipe(corpus, model, size), resume=model.exists(), progress=progress)


def recipe(corpus: Path, model: Path, size: DemoSize) -> Recipe:
    """Return the training recipe of a demo with its corpus and model in these places."""
    from prismlm.training import load_recipe

    path = files("prismlm.training").joinpath("recipes", size.recipe)
    # Quoted as JSON, which is YAML, so that no path is taken for a number or a comment.
    places = [f"corpus={json.dumps(str(corpus))}", f"out={json.dumps(str(model))}"]
    return load_recipe(str(path), [*places, *size.overrides])


def _index(corpus: Path, model: Path, lens: Path, size: DemoSize, progress: Reporter) -> None:
    from prismlm.corpus import Corpus
    from prismlm.index.build import IndexOptions, build_index

    lm = prismlm.load(model)
    window = recipe(corpus, model, size).data.length
    options = IndexOptions(contexts=size.contexts, window=window, stride=window * 3 // 4)
    build_index(
        lm.model, lm.head, Corpus.open(corpus), lens, options, trained_on=True, progress=progress
    )


def _explain(model: Path, progress: Reporter) -> dict[str, prismlm.Trace]:
    lm = prismlm.load(model)
    traces: dict[str, prismlm.Trace] = {}
    with progress.task("Explaining", len(PROMPTS), "prompts") as task:
        for seed, (domain, prompt) in enumerate(PROMPTS.items()):
            traces[domain] = lm.explain(
                prompt, generate=GENERATED, temperature=TEMPERATURE, seed=seed
            )
            task.advance()
    return traces
