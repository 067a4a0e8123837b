"""Make a masked-diffusion decoder of a left-to-right one, on a part of its text and new facts.

    python -m benchmarks.attribution.planted_model planted --epochs 1 --seed 1
    python -m benchmarks.masked_diffusion.train planted diffusion
    python -m benchmarks.masked_diffusion.judge planted diffusion
    python -m benchmarks.masked_diffusion.render

A part that is there already is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.masked_diffusion.facts import plant
from benchmarks.masked_diffusion.model import (
    MaskedDiffusionLM,
    diffusion_loss,
    from_left_to_right,
)
from benchmarks.shared.options import script_options
from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.corpus.windows import WindowBatch
from prismlm.files import write_json
from prismlm.models.checkpoint import load_checkpoint

WINDOW = 128
TOKENS_PER_STEP = 1024
LEARNING_RATE = 1e-3
# In this share of the steps the causal mask is opened.
OPENING = 0.2
TRAINING_FILE = "training.json"


def main() -> None:
    """Plant, build and train what is missing."""
    parser = script_options(__doc__)
    parser.add_argument("planted", type=Path, help="what planted_model.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=16, help="one in so many real documents")
    parser.add_argument("--facts", type=int, default=16, help="for each number of documents")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    planted, out, seed = arguments.planted, arguments.out, arguments.seed
    before = load_checkpoint(planted / "model").model
    tokenizer = planted / "corpus" / "tokenizer"
    corpus, _ = plant(out, tokenizer, arguments.every, arguments.facts, seed)
    if (out / "model").exists():
        return
    torch.manual_seed(seed)
    model = from_left_to_right(before)
    began = time.process_time()
    history = train(model, corpus, arguments.epochs, seed)
    seconds = time.process_time() - began
    described = {"every": arguments.every, "epochs": arguments.epochs, "cpu_seconds": seconds}
    read = Corpus.open(planted / "corpus").meta["counts"]["tokens"]
    write_json(out / TRAINING_FILE, described | {"tokens_before": read, "history": history})
    model.save_pretrained(out / "model")


def maskable(batch: WindowBatch, corpus: Corpus) -> Tensor:
    """Return the tokens that may be masked: all but padding and the ends of documents, [B, T]."""
    return batch.owned & (batch.input_ids != corpus.eos_token_id)


def batches(corpus: Corpus, documents: np.ndarray, seed: int) -> Iterator[WindowBatch]:
    """Yield windows of documents, none with two of them, in an order drawn from a seed."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(documents)
    grid = document_windows(order, corpus.starts, corpus.lengths, WINDOW, WINDOW)
    found = list(window_batches(grid, corpus, TOKENS_PER_STEP, corpus.eos_token_id))
    for number in generator.permutation(len(found)).tolist():
        yield found[number]


def train(
    model: MaskedDiffusionLM, corpus: Corpus, epochs: int, seed: int
) -> list[dict[str, float]]:
    """Train a model in place; return the mean loss of every epoch, in nats a token."""
    documents = corpus.split("train")
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * sum(1 for _ in batches(corpus, documents, seed))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.1)
    # The order of the documents decides which windows share a batch, never how many there are.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, steps, pct_start=0.05, cycle_momentum=False
    )
    history: list[dict[str, float]] = []
    model.train()
    done = 0
    for epoch in range(epochs):
        losses: list[float] = []
        for batch in batches(corpus, documents, seed + epoch):
            model.open_share = min(1.0, done / (OPENING * steps))
            loss = diffusion_loss(
                model, batch.input_ids, maskable(batch, corpus), batch.attention_mask, generator
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            done += 1
        history.append({"epoch": epoch + 1, "loss": float(np.mean(losses))})
        print(history[-1], flush=True)
    model.open_share = 1.0
    model.eval()
    return history


if __name__ == "__main__":
    main()
