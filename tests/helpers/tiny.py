"""A model small enough to train while the tests start, with everything a model directory holds."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F

from prismlm.corpus import Corpus, build_corpus, pack
from prismlm.layers import PrototypeHead
from prismlm.lens.build import IndexOptions, build_index
from prismlm.models.presets import build_config, build_model
from prismlm.models.seam import LogitMap, capture
from prismlm.models.sidecar import Sidecar, base_of, save_sidecar
from tests.helpers.records import sample_starts

DOCUMENTS = 320
CHARACTERS = 1500
ROW = 128
ROWS_PER_STEP = 8
STEPS = 150
PLACED_AT = 60
PROTOTYPES = 192
PROTOTYPES_PER_TOKEN = 8


def build_tiny_corpus(directory: Path) -> Path:
    """Write the starts of some hundred documents from all over the bundled sample."""
    return build_corpus(_documents(directory), directory / "sample", vocab_size=2048).path


def build_small_corpus(tiny_model: Path, directory: Path, every: int = 5) -> Path:
    """Write one in so many of those documents, with the tiny model's tokens."""
    source = _documents(directory, every)
    return build_corpus(source, directory / "small", tokenizer=tiny_model).path


def _documents(directory: Path, every: int = 1) -> Path:
    source = directory / "documents.parquet"
    pq.write_table(sample_starts(DOCUMENTS, CHARACTERS, every), source)
    return source


def train_tiny_model(tiny_corpus: Path, directory: Path) -> Path:
    """Train backbone and head together, save them, and index the corpus."""
    corpus, directory = Corpus.open(tiny_corpus), directory / "tiny"
    torch.manual_seed(0)
    config = build_config({"preset": "llama-tiny"}, len(corpus.tokenizer), corpus.eos_token_id)
    model = build_model(config)
    head = PrototypeHead(config.hidden_size, PROTOTYPES, PROTOTYPES_PER_TOKEN)
    head.reset_parameters()
    _train(model, head, corpus)
    model.eval()
    model.save_pretrained(directory)
    corpus.tokenizer.save_pretrained(directory)
    provenance = {
        "recipe": {"name": "tiny", "data": {"length": ROW}},
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "steps": STEPS,
    }
    save_sidecar(directory, Sidecar(head, LogitMap.of(model), base_of(model), provenance))
    options = IndexOptions(contexts=8, window=ROW, stride=96)
    build_index(model, head, corpus, directory / "lens" / "sample", options, trained_on=True)
    return directory


def _train(model, head, corpus):
    rows = pack(corpus, corpus.split("train"), ROW, seed=0)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    for step in range(STEPS):
        first = step * ROWS_PER_STEP
        batch = [rows[i % len(rows)] for i in range(first, first + ROWS_PER_STEP)]
        ids, positions, labels, mask = (
            torch.stack(column) for column in zip(*map(dict.values, batch), strict=True)
        )
        with capture(model) as seen:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if step == PLACED_AT:
            states = seen.z[mask].detach()
            head.place_on(states[torch.randperm(len(states))[:PROTOTYPES]])
        if step >= PLACED_AT:
            parts = head.losses(seen.z.detach(), head(seen.z.detach(), mask=mask), mask=mask)
            loss = loss + parts.prototype_pull + parts.point_pull + parts.residual
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
