"""Train a masked-diffusion decoder on a part of the bundled sample with planted facts.

    python -m benchmarks.masked_diffusion.train diffusion
    python -m benchmarks.masked_diffusion.judge diffusion

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
    build_masked_diffusion,
    diffusion_loss,
)
from benchmarks.shared.options import script_options
from prismlm.corpus import Corpus, document_windows, window_batches
from prismlm.corpus.windows import WindowBatch
from prismlm.files import write_json

PRESET = "llama-laptop"
# Weights begin larger than a preset's: a mask says nothing of itself, so the model knows no more
# than how frequent tokens are until attention tells places apart. Small steps, many of them.
SETTINGS = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
WINDOW = 128
TOKENS_PER_STEP = 512
LEARNING_RATE = 2e-3
# In the first half of the epochs no text has more masks than this: from a text of masks alone there
# is nothing to learn but how frequent tokens are.
FIRST_MASKED = 0.3
TRAINING_FILE = "training.json"


def main() -> None:
    """Plant, build and train what is missing."""
    parser = script_options(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=12, help="one in so many real documents")
    parser.add_argument("--facts", type=int, default=16, help="for each number of documents")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed
    corpus, _ = plant(out, arguments.every, arguments.facts, seed)
    if (out / "model").exists():
        return
    torch.manual_seed(seed)
    tokens, end = len(corpus.tokenizer), corpus.eos_token_id
    model = build_masked_diffusion(PRESET, tokens, end, **SETTINGS)
    began = time.process_time()
    history = train(model, corpus, arguments.epochs, seed)
    options = {key: value for key, value in vars(arguments).items() if key != "out"}
    noted = {"options": options, "cpu_seconds": time.process_time() - began, "history": history}
    write_json(out / TRAINING_FILE, noted)
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
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    # The order of the documents decides which windows share a batch, never how many there are.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, steps, pct_start=0.05, cycle_momentum=False
    )
    history: list[dict[str, float]] = []
    model.train()
    for epoch in range(epochs):
        most = FIRST_MASKED if epoch < epochs // 2 else 1.0
        losses: list[float] = []
        for batch in batches(corpus, documents, seed + epoch):
            loss = diffusion_loss(
                model,
                batch.input_ids,
                maskable(batch, corpus),
                batch.attention_mask,
                generator,
                most,
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        history.append({"epoch": epoch + 1, "most_masked": most, "loss": float(np.mean(losses))})
        print(history[-1], flush=True)
    model.eval()
    return history


if __name__ == "__main__":
    main()
