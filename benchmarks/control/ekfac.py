"""EK-FAC influence of each document on each answer of the bank of ``what_if.py``, by bergson.

    pip install bergson==2.5.1
    python -m benchmarks.control.ekfac WORK

The influence of a document d on an answer q, in the model of all documents (George et al. 2018;
Grosse et al. 2023):

    ∇ ln p(q)ᵀ (G + λ)⁻¹ ∇ ln p(d)        λ = 0.1 of the mean eigenvalue of G, layer by layer

Gradients are of A and B of every adapter, ln p of an answer's tokens; G is the EK-FAC of their
Gauss-Newton matrix with labels that the model samples. All settings are bergson's defaults. WORK
needs what ``what_if.py bank`` and ``what_if_judged.py`` wrote. Weights are float32 here.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_from_disk

from benchmarks.attach.demo_lessons import IGNORED
from benchmarks.control.what_if import Documents, opened
from benchmarks.shared.options import script_options
from prismlm.files import json_text, read_json


def write_rows(path: Path, documents: Documents, count: int) -> None:
    """Write the first questions and answers as bergson reads them, a loss on the answers alone."""
    lines: list[str] = []
    for asked, answer in map(documents.alone, range(count)):
        ids, labels = asked + answer, [IGNORED] * len(asked) + answer
        lines.append(json_text({"input_ids": ids, "labels": labels, "length": len(ids)}))
    path.write_text("\n".join(lines) + "\n")


def run_bergson(work: Path, run: Path) -> None:
    """Run ``bergson ekfac``: gradients of the questions, the factors, and every pair's product."""
    files = {"data": run / "documents.jsonl", "query": run / "questions.jsonl"}
    named = [word for name, path in files.items() for word in (f"--{name}.dataset", str(path))]
    model = ["--model", str(work / "model" / "adapter"), "--tokenizer", str(work / "smollm2")]
    method = ["--method", "kfac", "--hessian_cfg.ev_correction", "True"]
    command = [sys.executable, "-m", "bergson", "ekfac", str(run / "out"), *model, *named, *method]
    subprocess.run([*command, "--query.aggregation", "none"], check=True)


def read_scores(scores: Path) -> np.ndarray:
    """Return bergson's scores, [documents, questions]."""
    info = read_json(scores / "info.json")
    kind: Any = np.dtype(info["dtype"])
    rows: Any = np.memmap(scores / "scores.bin", dtype=kind, mode="r", shape=info["num_rows"])
    assert all(rows[f"written_{n}"].all() for n in range(info["num_scores"]))
    return np.stack([rows[f"score_{n}"] for n in range(info["num_scores"])], 1)


def main() -> None:
    """Write WORK/ekfac.npz: influence [questions, documents], and each answer's ln p there."""
    parser = script_options(__doc__)
    parser.add_argument("work", type=Path)
    work = parser.parse_args().work
    pairs, _, documents = opened("", work)
    run, begun = work / "ekfac", time.monotonic()
    run.mkdir(exist_ok=True)
    write_rows(run / "documents.jsonl", documents, len(pairs))
    write_rows(run / "questions.jsonl", documents, len(documents.asked))
    run_bergson(work, run)
    losses = np.array(load_from_disk(str(run / "out" / "query" / "data.hf"))["loss"])
    seconds = round(time.monotonic() - begun)
    influence = read_scores(run / "out" / "scores").T
    np.savez(
        work / "ekfac.npz",
        influence=influence,
        log_p=-losses,
        seconds=seconds,
        version=version("bergson"),
    )


if __name__ == "__main__":
    main()
