"""A small model trained on the bundled texts, its index, and one prompt per domain."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import prismlm
from prismlm.corpus import build_corpus, sample_path
from prismlm.demo.prompts import STATE_FILE, DemoResult, explain_prompts, holds, note_of
from prismlm.demo.texts import documents
from prismlm.files import json_text, keep_json
from prismlm.lens.build import IndexOptions
from prismlm.models.sidecar import has_sidecar
from prismlm.progress import SILENT, Reporter


@dataclass(frozen=True)
class DemoSize:
    """How much the demo builds."""

    recipe: str  # the name of a training recipe in the package
    vocab_size: int
    every: int  # one in so many documents of the bundled sample is read
    contexts: int  # contexts stored per prototype
    overrides: tuple[str, ...] = ()  # ``a.b=value``, for the recipe


FULL = DemoSize("demo.yaml", vocab_size=4096, every=1, contexts=32)
QUICK = DemoSize("demo-quick.yaml", vocab_size=2048, every=4, contexts=16)


def run_demo(out: Path, size: DemoSize = FULL, *, progress: Reporter = SILENT) -> DemoResult:
    """Build the missing ones of corpus, model, lens and report; then explain the prompts.

    Every part is complete or absent: an interrupted demo resumes with the first missing part, and
    training from its last checkpoint.

    Args:
        out: where to build; a directory that the demo made, or a new one.
        size: FULL, or QUICK: a smaller model on a quarter of the documents.
        progress: shows progress.

    Raises:
        InputError: ``out`` holds something else, or a demo of another size or version.
    """
    recipe = files("prismlm.training").joinpath("recipes", size.recipe)
    inputs = recipe.read_bytes(), sample_path().read_bytes(), repr(size).encode()
    note = note_of(size.recipe.removesuffix(".yaml"), *inputs)
    if not holds(out, note):
        keep_json(out / STATE_FILE, note)
    corpus, model = out / "corpus", out / "model"
    lens = model / "lens" / "sample"
    cached = lens.exists()
    if not (corpus / "corpus.json").is_file():
        source = documents(out / "documents.parquet", size.every)
        build_corpus([source], corpus, vocab_size=size.vocab_size, progress=progress)
    if not has_sidecar(model):
        from prismlm.training import load_recipe, train

        # Quoted as JSON, which is YAML, so that no path is taken for a number or a comment.
        paths = [f"corpus={json_text(str(corpus))}", f"out={json_text(str(model))}"]
        settings = load_recipe(str(recipe), [*paths, *size.overrides])
        train(settings, resume=model.exists(), progress=progress)
    if not cached:
        options = IndexOptions(contexts=size.contexts)
        prismlm.index(model, corpus, lens, options, device="cpu", progress=progress)
    return explain_prompts(out, cached=cached, progress=progress)
