"""A small model trained on the bundled texts, its index, and one prompt per domain."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prismlm
from prismlm import fingerprints
from prismlm.demo.prompts import (
    DemoResult,
    claim,
    documents,
    explain_prompts,
    parts_there,
)
from prismlm.files import json_text
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from prismlm.training import Recipe


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


FULL = DemoSize(
    "demo.yaml",
    vocab_size=4096,
    every=1,
    contexts=32,
)
QUICK = DemoSize(
    "demo-quick.yaml",
    vocab_size=2048,
    every=4,
    contexts=16,
)


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
    from prismlm.corpus import build_corpus

    out = Path(out)
    claim(out, identity(size))
    corpus, model = out / "corpus", out / "model"
    there = parts_there(out)
    if not there["corpus"]:
        source = documents(out / "documents.parquet", size.every)
        build_corpus([source], corpus, vocab_size=size.vocab_size, progress=progress)
    if not there["model"]:
        from prismlm.training import train

        train(recipe(corpus, model, size), resume=model.exists(), progress=progress)
    if not there["lens"]:
        from prismlm.lens.build import IndexOptions

        options = IndexOptions(contexts=size.contexts)
        prismlm.index(model, corpus, "sample", options, device="cpu", progress=progress)
    return explain_prompts(out, cached=all(there.values()), progress=progress)


def identity(size: DemoSize) -> dict[str, Any]:
    """Return what the note in a demo's directory says."""
    from prismlm.corpus import sample_path

    recipe = files("prismlm.training").joinpath("recipes", size.recipe).read_bytes()
    inputs = fingerprints.of_bytes(recipe, sample_path().read_bytes(), repr(size).encode())
    name = size.recipe.removesuffix(".yaml")
    return {"prismlm": prismlm.__version__, "size": name, "inputs": inputs}


def recipe(corpus: Path, model: Path, size: DemoSize) -> Recipe:
    """Return the training recipe of a demo with its corpus and model in these places."""
    from prismlm.training import load_recipe

    path = files("prismlm.training").joinpath("recipes", size.recipe)
    # Quoted as JSON, which is YAML, so that no path is taken for a number or a comment.
    places = [f"corpus={json_text(str(corpus))}", f"out={json_text(str(model))}"]
    return load_recipe(str(path), [*places, *size.overrides])
