"""Time an index beside the forward passes that it makes, and measure how it grows.

    python -m benchmarks.index.measure ratio MODEL CORPUS
    python -m benchmarks.index.measure growth CORPUS

``ratio`` makes every forward pass of an index three times in turns, each in one process: alone as
the index makes it, alone with the logits that a plain call of the model also computes, and with all
that the index does with it. ``growth`` indexes ever larger corpora, all cut from one, with a small
untrained model, each in a process of its own. Both write docs/results/index.json.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.index.scale import memory
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.__main__ import set_environment
from prismlm.allocator import keep_freed_memory
from prismlm.corpus import Corpus, Document
from prismlm.corpus.windows import PASS_TOKENS, window_batches
from prismlm.files import read_json, write_json
from prismlm.layers import PrototypeHead
from prismlm.lens import scan as index_scan
from prismlm.lens.build import IndexOptions, build_index
from prismlm.lens.cell_files import spooled_type, write_run
from prismlm.lens.cells import Int8Codes
from prismlm.lens.scan import predicting, states_of
from prismlm.models.checkpoint import load_checkpoint
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import capture
from prismlm.statistics import bootstrap

RESULT = RESULTS / "index.json"
WARM_UP = 5
PROTOTYPES, PER_TOKEN, CONTEXTS = 256, 8, 16


def main() -> None:
    """Run one of the two and add its figures to the result."""
    parser = script_options(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    ratio = commands.add_parser("ratio")
    ratio.add_argument("model", type=Path)
    ratio.add_argument("corpus", type=Path)
    ratio.add_argument(
        "--tokens", type=int, help="stop after so many; the whole corpus if not given"
    )
    ratio.add_argument("--called", default="the model of `demo --train`", help="on the page")
    ratio.add_argument("--bf16", action="store_true", help="index in bfloat16")
    growth = commands.add_parser("growth")
    growth.add_argument("corpus", type=Path)
    growth.add_argument("--tokens", type=int, nargs="*", default=[10**5, 10**6, 10**7, 3 * 10**7])
    arguments = parser.parse_args()
    before: dict[str, Any] = read_json(RESULT) if RESULT.exists() else {}
    # Each may be measured at another time, so that each has its own.
    if arguments.command == "ratio":
        given = arguments.model, arguments.corpus, arguments.tokens
        found = measure_ratio(*given, bf16=arguments.bf16)
        found |= {"model": arguments.called, "environment": environment()}
        others = [row for row in before.get("ratio", []) if row["model"] != found["model"]]
        rows = sorted([*others, found], key=lambda row: row["parameters"])
        write_json(RESULT, before | {"ratio": rows})
    else:
        where = before.get("environment", {}) | {"growth": environment()}
        found = measure_growth(arguments.corpus, arguments.tokens)
        write_json(RESULT, before | {"environment": where, "growth": found})
    print(read_json(RESULT)[arguments.command])


def measure_ratio(
    model: Path, corpus: Path, tokens: int | None, *, bf16: bool = False
) -> dict[str, Any]:
    """Return the time of an index over that of its forward passes, and of plain calls."""
    checkpoint = load_checkpoint(model)
    plain, head = checkpoint.model, checkpoint.sidecar.head
    text = Corpus.open(corpus)
    options = IndexOptions(contexts=64, window=256, stride=192, bf16=bf16)
    given = index_scan.ScanInput(plain, text, options, head)
    autocast = torch.autocast(plain.device.type, torch.bfloat16, enabled=bf16)
    work = tempfile.TemporaryDirectory()
    codes = Int8Codes()
    dtype = spooled_type(given.cells)
    read: list[np.ndarray] = []
    scan, order, slot = index_scan.Scan.empty(given), given.order, 0
    seconds: list[tuple[float, float, float]] = []
    keep_freed_memory()
    with work, torch.inference_mode():
        while slot < order.count and not (tokens and scan.tokens >= tokens):
            grid = order.windows(slot, text, "train", 256, 192)
            for batch in window_batches(grid, text, PASS_TOKENS):
                inputs = {"input_ids": batch.input_ids, "use_cache": False}
                inputs["attention_mask"] = batch.attention_mask.long()
                began = time.process_time()
                with autocast, capture(plain, logits=False):
                    plain(**inputs)
                alone = time.process_time()
                plain(**inputs)
                with_logits = time.process_time()
                owned = predicting(batch, text)
                states = states_of(plain, batch, owned, bf16=bf16)
                read.append(index_scan.scan_pass(scan, given, batch, owned, states, codes))
                indexed = time.process_time()
                seconds.append((alone - began, with_logits - alone, indexed - with_logits))
            slot += 1
        began = time.process_time()
        write_run(Path(work.name) / "positions", read, dtype, head.num_prototypes)
        settling = time.process_time() - began
    times = np.array(seconds[WARM_UP:])
    times[-1, 2] += settling
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "prototypes": head.num_prototypes,
        "tokens": scan.tokens,
        "ratio": _ratio(times[:, 2], times[:, 0]),
        "ratio_with_logits": _ratio(times[:, 2], times[:, 1]),
    }


def _ratio(index: np.ndarray, forward: np.ndarray) -> dict[str, float]:
    """Return the ratio of the sums with a 95 % interval over resampled passes."""
    found = bootstrap(index, forward)
    return {"ratio": found.value, "low": found.low, "high": found.high}


def measure_growth(source: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Return time, memory and disk of indexes of growing corpora."""
    set_environment()  # as the command does, for the processes that index
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        corpus = Corpus.open(source)
        for size in sizes:
            part = work / "part"
            _cut(corpus, part, size)
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=_index_part, args=(part, work / "lens", queue))
            child.start()
            rows.append(queue.get())
            child.join()
            print(rows[-1])
            shutil.rmtree(part)
            shutil.rmtree(work / "lens")
    return rows


def _cut(corpus: Corpus, out: Path, tokens: int) -> None:
    """Write the first documents of a corpus, and as often anew as it takes, as a corpus."""
    from prismlm.corpus.writer import merge_parts, write_part

    part = out / "part"
    part.mkdir(parents=True)
    for _ in write_part(part, corpus.tokenizer, _repeated(corpus, tokens)):
        pass
    merge_parts([part], out, corpus.tokenizer, 0.0)
    shutil.rmtree(part)


def _repeated(corpus: Corpus, tokens: int) -> Iterator[Document]:
    step, written = max(1, corpus.num_tokens // tokens), 0
    for turn in count():
        for index in range(0, len(corpus), step):
            name, source = f"{corpus.doc_ids[index]}-{turn}", corpus.column("source")[index]
            yield Document(name, corpus.text(index), source)
            written += int(corpus.lengths[index])
            if written >= tokens:
                return


def _watch_peak(peak: list[int], over: threading.Event) -> None:
    """Note the largest own memory in ``peak``, looked at a hundred times a second."""
    while not over.wait(0.01):
        peak[0] = max(peak[0], memory("RssAnon"))


def _index_part(path: Path, out: Path, queue: Any) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    corpus = Corpus.open(path)
    changes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    changes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = build_config(
        {"preset": "llama-tiny", **changes}, len(corpus.tokenizer), corpus.eos_token_id
    )
    model = build_model(config).eval()
    head = PrototypeHead(config.hidden_size, PROTOTYPES, PER_TOKEN)
    head.reset_parameters()
    options = IndexOptions(contexts=CONTEXTS, window=256, stride=192)
    before, over = memory("RssAnon"), threading.Event()
    peak = [before]
    watch = threading.Thread(target=_watch_peak, args=(peak, over), daemon=True)
    watch.start()
    began = time.process_time()
    build_index(model, head, corpus, out, options)
    seconds = time.process_time() - began
    over.set()
    watch.join()
    row = {"tokens": corpus.num_tokens, "documents": len(corpus), "cpu_seconds": seconds}
    row |= {"memory_bytes_before": before, "memory_bytes": peak[0]}
    queue.put(row | {"disk_bytes": sum(path.stat().st_size for path in out.iterdir())})


if __name__ == "__main__":
    main()
