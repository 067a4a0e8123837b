"""A model of 16,384 prototypes whose lens is of real text, made in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import prismlm
from prismlm.corpus import Corpus, build_corpus, pack, sample_path
from prismlm.index.build import IndexOptions, build_index
from prismlm.labels.write import label_lens, write_columns
from prismlm.layers import PrototypeHead
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar

PROTOTYPES, PER_TOKEN, CONTEXTS = 16_384, 32, 16
# Of the bundled sample: an index of all of it would take ten times as long.
ONE_IN = 10
VOCABULARY, PRESET = 4096, "llama-tiny"
STEPS, ROWS_PER_STEP, ROW, RATE = 150, 8, 128, 3e-3
WINDOW, STRIDE, SEED = 256, 192, 0


def make_model(root: Path) -> Path:
    """Write a part of the bundled sample as a corpus, and a model with a head and a lens of it.

    The backbone is trained for seconds, the prototypes are hidden states drawn from the corpus,
    and the places on the map are random.
    """
    sample = pq.read_table(sample_path())
    documents = root / "documents.parquet"
    pq.write_table(sample.take(np.arange(0, len(sample), ONE_IN)), documents)
    corpus = build_corpus(documents, root / "corpus", vocab_size=VOCABULARY)
    torch.manual_seed(SEED)
    config = build_config({"preset": PRESET}, len(corpus.tokenizer), corpus.eos_token_id)
    model = build_model(config)
    _train(model, corpus)
    model.eval()
    head = PrototypeHead(config.hidden_size, PROTOTYPES, PER_TOKEN)
    head.reset_parameters()
    head.place_on(_states(model, corpus))
    path = root / "model"
    model.save_pretrained(path)
    corpus.tokenizer.save_pretrained(path)
    save_sidecar(path, Sidecar(head, LogitMap.of(model), base_of(model), {}))
    options = IndexOptions(contexts=CONTEXTS, window=WINDOW, stride=STRIDE)
    build_index(model, head, corpus, path / "lens" / "sample", options, trained_on=True)
    lm = prismlm.load(path)
    assert lm.lens is not None
    label_lens(lm.lens, lm.model)
    places = np.random.default_rng(SEED).normal(size=(PROTOTYPES, 2)).astype(np.float32)
    write_columns(lm.lens, {"x": places[:, 0], "y": places[:, 1]}, map={"method": "random"})
    return path


def described(path: Path) -> dict[str, Any]:
    """Return the sizes that times depend on."""
    lm = prismlm.load(path)
    lens = lm.lens
    assert lens is not None
    assert lens.cells is not None
    files = (file for file in lens.path.iterdir() if file.is_file())
    return {
        "preset": PRESET,
        "parameters": sum(parameter.numel() for parameter in lm.model.parameters()),
        "width": lm.head.width,
        "prototypes": lm.head.num_prototypes,
        "prototypes_per_token": lm.head.prototypes_per_token,
        "vocabulary": len(lm.tokenizer),
        "documents": lens.meta.documents,
        "tokens": lens.meta.tokens,
        "positions": len(lens.cells),
        "contexts": lens.index.num_rows,
        "lens_bytes": sum(file.stat().st_size for file in files),
    }


def _batches(corpus: Corpus) -> Any:
    """Yield ids, positions, labels and mask of rows of training text, again and again."""
    rows = pack(corpus, corpus.split("train"), ROW, seed=SEED)
    first = 0
    while True:
        batch = [rows[i % len(rows)] for i in range(first, first + ROWS_PER_STEP)]
        yield [torch.stack(column) for column in zip(*map(dict.values, batch), strict=True)]
        first += ROWS_PER_STEP


def _train(model: PreTrainedModel, corpus: Corpus) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _, (ids, positions, labels, _) in zip(range(STEPS), _batches(corpus), strict=False):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def _states(model: PreTrainedModel, corpus: Corpus) -> Tensor:
    """Return as many hidden states of training text as there are prototypes, drawn by seed."""
    found: list[Tensor] = []
    for ids, positions, _, mask in _batches(corpus):
        with capture(model, logits=False) as seen:
            model(input_ids=ids, position_ids=positions, use_cache=False)
        found.append(seen.z[mask])
        # Twice as many, so that not every state of a text is one.
        if sum(map(len, found)) >= 2 * PROTOTYPES:
            break
    states = torch.cat(found)
    drawn = torch.Generator().manual_seed(SEED)
    return states[torch.randperm(len(states), generator=drawn)[:PROTOTYPES]]
