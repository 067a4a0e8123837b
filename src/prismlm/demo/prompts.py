"""What every demo has: its prompts, its directory, and the page at its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import prismlm
from prismlm.errors import InputError
from prismlm.files import atomic_file, read_json, write_json
from prismlm.pages.frame import write_page
from prismlm.pages.trace import page
from prismlm.progress import Reporter

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


def claim(out: Path, identity: dict[str, Any]) -> None:
    """Note whose directory this is, or check that the note is ours.

    Raises:
        InputError: it holds something else, or another demo.
    """
    if check_claim(out, identity):
        write_json(out / STATE_FILE, identity)


def check_claim(out: Path, identity: dict[str, Any]) -> bool:
    """Check that a demo may be built in a directory; return whether nobody has begun one there.

    Raises:
        InputError: it holds something else, or a demo of another size or version.
    """
    state = out / STATE_FILE
    if not state.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} exists and no demo made it. Choose another --out.")
        return True
    if read_json(state) != identity:
        raise InputError(
            f"{out} holds a demo of another size or version of prismlm. "
            "Choose another --out, or remove it."
        )
    return False


def documents(path: Path, every: int) -> Path:
    """Return the bundled sample, or write one in ``every`` of its documents to ``path``."""
    from prismlm.corpus import sample_path

    if every == 1:
        return sample_path()
    table = pq.read_table(sample_path())
    with atomic_file(path) as temporary:
        pq.write_table(table.take(list(range(0, len(table), every))), temporary)
    return path


def explain_prompts(
    out: Path, model: Path, corpus: Path, *, generated: int, cached: bool, progress: Reporter
) -> DemoResult:
    """Explain the prompt of each domain and write the page."""
    lm = prismlm.load(model)
    traces: dict[str, prismlm.Trace] = {}
    with progress.task("Explaining", len(PROMPTS), "prompts") as task:
        for seed, (domain, prompt) in enumerate(PROMPTS.items()):
            traces[domain] = lm.explain(
                prompt, generate=generated, temperature=TEMPERATURE, seed=seed
            )
            task.advance()
    report = out / REPORT_FILE
    write_page(page(list(traces.values()), title="prismlm demo"), report)
    return DemoResult(model, corpus, report, traces, cached)
