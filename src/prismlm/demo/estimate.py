"""What the demo would take, and what of it is there already; nothing is written to its place."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prismlm.cost import Cost
from prismlm.demo import fetched, trained
from prismlm.demo.prompts import REPORT_FILE, check_claim, documents, parts_there
from prismlm.demo.trained import FULL, DemoSize

if TYPE_CHECKING:
    from prismlm.training import Recipe

# One in so many documents is enough to measure on.
MEASURED_EVERY = 8
# Loading the model, the prompts and the page: assumed, not measured; seconds beside minutes.
EXPLAINING_SECONDS = 15.0
REPORT_BYTES = 3_000_000
# Of the model that is fetched: seconds, memory and disk of each part.
FETCHED = {
    "corpus": (5.0, 400_000_000, 3_000_000),
    "model": (30.0, 1_800_000_000, 560_000_000),
    "lens": (5.0, 400_000_000, 110_000_000),
}
FETCHED_NOTE = "89 MB are fetched"


def estimate_fetched(out: Path) -> Cost:
    """Estimate what :func:`prismlm.demo.fetched.run_fetched` would still do; nothing is fetched.

    Sizes are known; seconds are assumed, and leave out the fetching of 89 MB. Each part, corpus,
    model, lens and report, says by its figure ``there`` whether it is there and whole; the report
    is always written anew.

    Raises:
        InputError: ``out`` holds something else, or another demo.
    """
    out = Path(out)
    check_claim(out, fetched.identity())
    there = parts_there(out)
    parts = [
        _part(name, Cost(*amounts, basis=FETCHED_NOTE if name == "model" else ""), there[name])
        for name, amounts in FETCHED.items()
    ]
    return _whole(out, parts)


def estimate_demo(out: Path, size: DemoSize = FULL) -> Cost:
    """Estimate what :func:`prismlm.demo.trained.run_demo` with the same arguments would still do.

    A corpus of every eighth document is built in a temporary directory; on it, a few training
    steps and passes of an index are timed. Parts as of :func:`estimate_fetched`.

    Raises:
        InputError: ``out`` holds something else, or a demo of another size or version.
    """
    out = Path(out)
    check_claim(out, trained.identity(size))
    there = parts_there(out)
    parts = [_part(name, None, True) for name in there]
    if not all(there.values()):
        with tempfile.TemporaryDirectory() as name:
            parts = _measured(Path(name), out, size, there)
    return _whole(out, parts)


def _part(name: str, cost: Cost | None, there: bool) -> Cost:
    kept = Cost(0.0, 0, 0) if there or cost is None else cost
    return replace(kept, name=name, figures={**kept.figures, "there": there})


def _whole(out: Path, parts: list[Cost]) -> Cost:
    there = (out / REPORT_FILE).is_file()
    report = Cost(EXPLAINING_SECONDS, 0, 0 if there else REPORT_BYTES, {"there": there})
    parts = [*parts, replace(report, name="report")]
    return Cost(
        sum(part.seconds or 0.0 for part in parts),
        max(part.memory_bytes for part in parts),
        sum(part.disk_bytes or 0 for part in parts),
        {"out": str(out)},
        tuple(parts),
    )


def _measured(work: Path, out: Path, size: DemoSize, there: dict[str, bool]) -> list[Cost]:
    from prismlm.corpus import build_corpus, estimate_build

    source = documents(work / "documents.parquet", size.every)
    building = estimate_build([source], work / "corpus", vocab_size=size.vocab_size)
    less = documents(work / "measured.parquet", max(size.every, MEASURED_EVERY))
    build_corpus([less], work / "corpus", vocab_size=size.vocab_size)
    recipe = trained.recipe(work / "corpus", work / "model", size)
    training = None if there["model"] else _training(recipe, out / "model")
    indexing = None if there["lens"] else _index(recipe, size, building)
    costs = {"corpus": building, "model": training, "lens": indexing}
    return [_part(name, cost, there[name]) for name, cost in costs.items()]


def _training(recipe: Recipe, model: Path) -> Cost:
    from prismlm.training import estimate
    from prismlm.training.checkpoints import latest_checkpoint, step_of
    from prismlm.training.setup import CHECKPOINTS

    found, newest = estimate(recipe), latest_checkpoint(model / CHECKPOINTS)
    done = 0 if newest is None else step_of(newest)
    seconds = found.seconds_per_step * max(0, found.steps - done)
    note = f"goes on from step {done:,} of {found.steps:,}" if done else ""
    return replace(found, seconds=seconds, basis=note)


def _index(recipe: Recipe, size: DemoSize, corpus: Cost) -> Cost:
    from prismlm.index.build import IndexOptions
    from prismlm.index.estimate import estimate_index
    from prismlm.training.setup import prepare

    prepared = prepare(recipe)
    window = recipe.data.length
    options = IndexOptions(contexts=size.contexts, window=window, stride=window * 3 // 4)
    module = prepared.model
    found = estimate_index(module.model, module.prototype_head, prepared.corpus, options)
    # Indexing reads the documents that training does: all that are not held out.
    read = 0.95 * (corpus.tokens - corpus.documents)
    return replace(found, seconds=read / found.tokens_per_second)
