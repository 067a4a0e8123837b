"""How long a prediction takes on a model that people use: EK-FAC of Bergson, and ``explain``.

    PYTHONPATH=bergson-site python -m benchmarks.attribution.ekfac_time MODEL

MODEL is a model directory with a lens that has cells, of a corpus that is still there. EK-FAC is
asked for the last of 65 held-out tokens, of all texts at once; it reads a gradient of every
document for them, and is given few: each number of documents is a run of its own, and earlier ones
are kept. ``explain`` reads the same 65 tokens, one text after another, and is asked for what
follows: one token more. It is given the lens as it is. The installation of Bergson is that of
``judged_by_bergson``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import prismlm
from benchmarks.attribution.judged_by_bergson import VERSION, timed
from benchmarks.attribution.judges.tail_patch import IGNORED
from benchmarks.attribution.model_bank import write_rows
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.files import read_json, write_json

DOCUMENT_TOKENS, PROMPT_TOKENS, PREDICTIONS = 128, 64, 4


def main() -> None:
    """Time both, one after the other."""
    parser = script_options(__doc__, RESULTS / "attribution_ekfac_time.json")
    parser.add_argument("model", type=Path)
    parser.add_argument("--called", default="SmolLM2-135M, the demo's", help="on the page")
    parser.add_argument("--documents", type=int, default=64, help="that EK-FAC is given")
    args = parser.parse_args()
    lm = prismlm.load(args.model)
    assert lm.lens is not None
    assert lm.lens.cells is not None
    corpus = lm.lens.corpus
    assert corpus is not None, "the corpus of the lens is not where it was"
    asked = beginnings(corpus, "heldout", PREDICTIONS, PROMPT_TOKENS + 1)
    ekfac = by_ekfac(lm, corpus, asked, args) | {"documents": args.documents}
    run = {
        "model": args.called,
        "parameters": lm.model.num_parameters(),
        "predictions": len(asked),
        "prompt": PROMPT_TOKENS,
        "explain": explained(lm, asked) | {"documents": len(lm.lens.cells.documents)},
        "positions": len(lm.lens.cells),
        "bergson": VERSION,
        "ekfac": ekfac,
        "document": DOCUMENT_TOKENS,
        "environment": environment(),
    }
    before = read_json(args.out)["runs"] if args.out.is_file() else []
    others = [one for one in before if one["ekfac"]["documents"] != args.documents]
    runs = sorted([*others, run], key=lambda one: one["ekfac"]["documents"])
    write_json(args.out, {"runs": runs})
    print(run)


def beginnings(corpus: Corpus, split: Any, count: int, length: int) -> list[list[int]]:
    """Return the first tokens of the first documents of a split that are longer than that."""
    long = [d for d in corpus.split(split).tolist() if int(corpus.lengths[d]) > length]
    return [corpus.tokens(int(corpus.starts[d]), length).tolist() for d in long[:count]]


def explained(lm: prismlm.PrismLM, asked: list[list[int]]) -> dict[str, float]:
    """Return the seconds of a prediction with its passages; that of a whole text is the last's.

    The first is asked once before, so that what all need has been read from the disk.
    """
    seconds: list[float] = []
    for ids in (asked[0], *asked):
        began = time.perf_counter()
        trace = lm.explain(str(lm.tokenizer.decode(ids)))
        last = trace[len(trace) - 1 :]
        last.sources("source")
        last.documents(10)
        last.passages(10)
        seconds.append(time.perf_counter() - began)
    return {"a prediction": statistics.mean(seconds[1:])}


def by_ekfac(
    lm: prismlm.PrismLM, corpus: Corpus, asked: list[list[int]], args: argparse.Namespace
) -> dict[str, float]:
    """Return the seconds of EK-FAC: once, and a prediction, all of them asked at once."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        lm.model.save_pretrained(work / "model")
        lm.tokenizer.save_pretrained(work / "model")
        rows = beginnings(corpus, "train", args.documents, DOCUMENT_TOKENS)
        write_rows(work / "documents.jsonl", rows, rows)
        labels = [[IGNORED] * (len(row) - 1) + row[-1:] for row in asked]
        write_rows(work / "queries.jsonl", asked, labels)
        index = {
            "model": str(work / "model"),
            "overwrite": True,
            "token_batch_size": 512,
            "max_batch_size": 4,
            "filter_modules": "lm_head",
            "data": {"dataset": str(work / "documents.jsonl"), "split": "train"},
        }
        query = {"dataset": str(work / "queries.jsonl"), "split": "train"}
        seconds = timed("Bergson EK-FAC", work, index, query)
    return {"once": seconds["once"], "a prediction": seconds["a prediction"] / len(asked)}


if __name__ == "__main__":
    main()
