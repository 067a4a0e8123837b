"""What a question takes whose lens is in an object store, beside the same lens on a disk.

    python -m benchmarks.index.stored MODEL

The lens is copied into moto, a server on loopback that speaks S3. Each question and answer is read
by the model; then what it relies on is timed: from the disk, from the store with nothing cached,
and from the store when it is asked again.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import prismlm
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.demo.prompts import QUESTIONS
from prismlm.files import write_json
from prismlm.lens.lens import Lens
from prismlm.lens.store import StoredFiles

BUCKET, GENERATED = "lenses", 24


def main() -> None:
    """Measure and write the result."""
    parser = script_options(__doc__, RESULTS / "stored_lens.json")
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    lm = prismlm.load(args.model)
    result = compare(lm, upload(lm.lens_for("lens to copy").path))
    write_json(args.out, result | {"environment": environment("cpu")})
    server.stop()


def upload(lens: Path) -> str:
    """Copy a lens into the store, and return its address."""
    import s3fs

    store = s3fs.S3FileSystem()
    store.mkdir(BUCKET)
    for file in lens.iterdir():
        store.put_file(str(file), f"{BUCKET}/{lens.name}/{file.name}")
    return f"s3://{BUCKET}/{lens.name}"


def compare(lm: prismlm.PrismLM, address: str) -> dict[str, Any]:
    """Ask all questions of both lenses, whose answers must be equal."""
    lens = lm.lens_for("lens to compare with")
    rows: list[dict[str, Any]] = []
    for question in QUESTIONS.values():
        messages = [{"role": "user", "content": question}]
        trace = lm.explain(messages, generate=GENERATED)
        answered = [*messages, {"role": "assistant", "content": trace.answer}]
        expected, _ = timed(lm, answered)
        local = statistics.median(timed(lm, answered)[1] for _ in range(5))
        stored = replace(lm, lens=Lens.open(address, lm.model, lm.head))
        assert stored.lens is not None
        stored.lens.tokenizer = lm.tokenizer
        files = stored.lens.files
        assert isinstance(files, StoredFiles)
        same, cold = timed(stored, answered)
        assert same == expected
        requests, read = files.requests, files.bytes_read
        warm = statistics.median(timed(stored, answered)[1] for _ in range(5))
        row = {"question": question, "requests": requests, "bytes": read}
        rows.append(row | {"local": local, "cold": cold, "warm": warm})
    size = sum(file["bytes"] for file in lens.meta.files.values())
    figures = ("requests", "bytes", "local", "cold", "warm")
    medians = {name: statistics.median(row[name] for row in rows) for name in figures}
    return {"positions": len(lens.cells), "bytes": size, "median": medians, "questions": rows}


def timed(lm: prismlm.PrismLM, messages: list[dict[str, str]]) -> tuple[dict[str, Any], float]:
    """Return what an answer relies on, and the seconds that finding it took."""
    trace = lm.explain(messages)
    began = time.perf_counter()
    found = {
        "documents": [(one.doc_id, one.share, one.text) for one in trace.documents(3)],
        "sources": trace.sources(by="source").to_dict(),
        "quotes": [quote.text for quote in trace.verbatim(3)],
    }
    return found, time.perf_counter() - began


if __name__ == "__main__":
    main()
