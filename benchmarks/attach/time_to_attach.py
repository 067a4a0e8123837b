"""How long ``prismlm attach`` takes, part by part, beside the bare passes of the model.

    python -m benchmarks.attach.time_to_attach MODEL

MODEL is a checkpoint before fine-tuning. The head has the size and settings of the one that ships
with the demo, the corpus is a part of the bundled sample. Times are of the processor, so that what
else runs here does not count.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.attach.demo_model import OPTIONS
from benchmarks.shared.environment import environment
from benchmarks.shared.options import RESULTS, script_options
from prismlm.corpus import Corpus
from prismlm.demo.prompts import documents
from prismlm.files import write_json
from prismlm.progress import SILENT, Task
from prismlm.training import attach

# One document of the sample in so many is read, and so many tokens are timed without a head.
EVERY, BARE = 40, 20_480


class Timed:
    """Notes the processor time of every piece of work that is reported."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def task(
        self, description: str, total: int | None = None, unit: str = "tokens"
    ) -> Iterator[Task]:
        """Time a piece of work."""
        began = time.process_time()
        try:
            yield SILENT
        finally:
            spent = time.process_time() - began
            self.seconds[description] = self.seconds.get(description, 0.0) + spent


def main() -> None:
    """Time the passes and the command, and write both."""
    parser = script_options(__doc__, RESULTS / "attach_time.json")
    parser.add_argument("model", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sample = documents(Path(folder) / "sample.parquet", EVERY)
        timed, options = Timed(), replace(OPTIONS, lora=None, keep_states=False)
        began = time.process_time()
        made = attach(str(args.model), [sample], Path(folder) / "out", options, progress=timed)
        whole = time.process_time() - began
        corpus = Corpus.open(made.corpus)
        tokens = int(corpus.lengths.sum())
        passes = bare_passes(args.model, corpus, OPTIONS.window or 512)
    result = {
        "tokens": tokens,
        "states": made.states,
        "prototypes": options.fit.prototypes,
        "per_token": options.fit.prototypes_per_token,
        "epochs": options.fit.epochs,
        "batch": options.fit.batch,
        "seconds": whole,
        "parts": timed.seconds,
        "passes": {"tokens": BARE, "seconds": passes},
        "environment": environment(),
    }
    write_json(args.out, result)
    print(f"wrote {args.out}")


@torch.inference_mode()
def bare_passes(model: Path, corpus: Corpus, window: int) -> float:
    """Return the processor time of the model's passes over some tokens, without logits."""
    decoder = AutoModelForCausalLM.from_pretrained(model).eval().base_model
    ids = torch.from_numpy(corpus.read_tokens(0, BARE).astype("int64"))
    began = time.process_time()
    for part in ids.split(window):
        decoder(input_ids=part[None], use_cache=False)
    return time.process_time() - began


if __name__ == "__main__":
    main()
