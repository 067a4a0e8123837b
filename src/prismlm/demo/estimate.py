"""What the demo would take, and what of it is there already; nothing is written to its place."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from prismlm.demo import fetched, trained
from prismlm.demo.prompts import REPORT_FILE, check_claim, documents
from prismlm.demo.trained import FULL, DemoSize

if TYPE_CHECKING:
    from prismlm.index.estimate import IndexEstimate
    from prismlm.training import Recipe, TrainingEstimate

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


@dataclass(frozen=True, slots=True)
class DemoPart:
    """One part of the demo.

    Attributes:
        name: corpus, model, lens or report.
        there: whether it is there and whole, so that it is not built again.
        seconds: left to do, roughly; 0 where it is there. The report is always written anew.
        memory_bytes: the peak while it is built; 0 where it is there.
        disk_bytes: still to be written; 0 where it is there.
        note: what was begun, or empty.
    """

    name: str
    there: bool
    seconds: float
    memory_bytes: int
    disk_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class DemoEstimate:
    """What a demo would take: the sum of its parts, memory being the largest of them.

    Attributes:
        out: where it would be built.
        parts: in the order in which they are built.
        seconds, memory_bytes, disk_bytes: of the whole.
    """

    out: str
    parts: list[DemoPart]
    seconds: float
    memory_bytes: int
    disk_bytes: int


def estimate_fetched(out: Path) -> DemoEstimate:
    """Estimate what :func:`prismlm.demo.run_fetched` would still do; nothing is fetched.

    Sizes are known; seconds are assumed, and leave out the fetching of 89 MB.

    Raises:
        InputError: ``out`` holds something else, or another demo.
    """
    out = Path(out)
    check_claim(out, fetched.identity())
    there = fetched.parts_there(out)
    parts = [
        DemoPart(name, True, 0.0, 0, 0)
        if there[name]
        else DemoPart(name, False, *amounts, FETCHED_NOTE if name == "model" else "")
        for name, amounts in FETCHED.items()
    ]
    return _whole(out, [*parts, _report(out)])


def estimate_demo(out: Path, size: DemoSize = FULL) -> DemoEstimate:
    """Estimate what :func:`prismlm.demo.run_demo` with the same arguments would still do.

    A corpus of every eighth document is built in a temporary directory; on it, a few training
    steps and passes of an index are timed.

    Raises:
        InputError: ``out`` holds something else, or a demo of another size or version.
    """
    out = Path(out)
    check_claim(out, trained.identity(size))
    there = trained.parts_there(out)
    parts = [DemoPart(name, whole, 0.0, 0, 0) for name, whole in there.items()]
    if not all(there.values()):
        with tempfile.TemporaryDirectory() as name:
            parts = _measured(Path(name), out, size, there)
    return _whole(out, [*parts, _report(out)])


def _report(out: Path) -> DemoPart:
    there = (out / REPORT_FILE).is_file()
    return DemoPart("report", there, EXPLAINING_SECONDS, 0, 0 if there else REPORT_BYTES)


def _whole(out: Path, parts: list[DemoPart]) -> DemoEstimate:
    return DemoEstimate(
        str(out),
        parts,
        seconds=sum(part.seconds for part in parts),
        memory_bytes=max(part.memory_bytes for part in parts),
        disk_bytes=sum(part.disk_bytes for part in parts),
    )


def _measured(work: Path, out: Path, size: DemoSize, there: dict[str, bool]) -> list[DemoPart]:
    from prismlm.corpus import build_corpus, estimate_build
    from prismlm.training import estimate

    source = documents(work / "documents.parquet", size.every)
    building = estimate_build([source], work / "corpus", vocab_size=size.vocab_size)
    less = documents(work / "measured.parquet", max(size.every, MEASURED_EVERY))
    build_corpus([less], work / "corpus", vocab_size=size.vocab_size)
    recipe = trained.recipe(work / "corpus", work / "model", size)
    training = None if there["model"] else estimate(recipe)
    indexing = None if there["lens"] else _index(recipe, size)
    corpus = DemoPart(
        "corpus", there["corpus"], building.seconds, building.memory_bytes, building.disk_bytes
    )
    # Indexing reads the documents that training does: all that are not held out.
    read = 0.95 * (building.tokens - building.documents)
    return [
        replace(corpus, seconds=0.0, memory_bytes=0, disk_bytes=0) if there["corpus"] else corpus,
        _model(training, out / "model"),
        DemoPart("lens", True, 0.0, 0, 0)
        if indexing is None
        else DemoPart(
            "lens",
            False,
            read / indexing.tokens_per_second,
            indexing.memory_bytes,
            indexing.disk_bytes,
        ),
    ]


def _model(training: TrainingEstimate | None, model: Path) -> DemoPart:
    if training is None:
        return DemoPart("model", True, 0.0, 0, 0)
    from prismlm.training.checkpoints import latest_checkpoint, step_of
    from prismlm.training.setup import CHECKPOINTS

    newest = latest_checkpoint(model / CHECKPOINTS)
    done = 0 if newest is None else step_of(newest)
    seconds = training.seconds_per_step * max(0, training.steps - done)
    note = f"goes on from step {done:,} of {training.steps:,}" if done else ""
    return DemoPart("model", False, seconds, training.memory_bytes, training.disk_bytes, note)


def _index(recipe: Recipe, size: DemoSize) -> IndexEstimate:
    from prismlm.index.build import IndexOptions
    from prismlm.index.estimate import estimate_index
    from prismlm.training.setup import prepare

    prepared = prepare(recipe)
    window = recipe.data.length
    options = IndexOptions(contexts=size.contexts, window=window, stride=window * 3 // 4)
    module = prepared.model
    return estimate_index(module.model, module.prototype_head, prepared.corpus, options)
