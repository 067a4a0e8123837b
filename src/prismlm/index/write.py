"""Writing what a scan has found: contexts with the text around them, states, prototypes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from prismlm.files import share
from prismlm.index import layout
from prismlm.index.signatures import top_signatures
from prismlm.layers import PrototypeHead
from prismlm.models.sidecar import weight_of
from prismlm.ops.top_contexts import Contexts
from prismlm.progress import Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.index.scan import Scan

CHARACTERS_BEFORE = 160
CHARACTERS_AFTER = 80


def write_index(
    directory: Path, kept: Contexts, corpus: Corpus, with_text: bool, progress: Reporter
) -> None:
    """Write ``index.parquet``, by prototype and then by rank."""
    prototype = kept.prototype.numpy()
    first = np.searchsorted(prototype, prototype)
    document = kept.document.numpy()
    documents, row = np.unique(document, return_inverse=True)
    found = corpus.documents.take(documents)
    texts = (
        _texts(corpus, documents, found["start"].to_numpy(), row, kept.position.numpy(), progress)
        if with_text
        else [pa.nulls(len(document), pa.string())] * 3
    )
    names = ("doc_id", "source", "domain", "license", "title", "url")
    metadata = found.select(names).take(pa.array(row)).columns
    table = pa.table(
        [
            pa.array(prototype.astype(np.int32)),
            pa.array((np.arange(len(prototype)) - first).astype(np.int32)),
            pa.array(kept.cosine.numpy()),
            pa.array(kept.activation.numpy()),
            pa.array(kept.routed.numpy()),
            pa.array(kept.position.numpy()),
            *metadata,
            *texts,
        ],
        schema=layout.INDEX_SCHEMA,
    )
    layout.write_table(table, directory / layout.INDEX_FILE, row_group_size=8192)


def _texts(
    corpus: Corpus,
    documents: np.ndarray,
    starts: np.ndarray,
    row: np.ndarray,
    position: np.ndarray,
    progress: Reporter,
) -> list[pa.Array]:
    """Return before, token and after for every context; each document is encoded once."""
    before, token, after = ([""] * len(row) for _ in range(3))
    order = np.argsort(row, kind="stable")
    groups = np.split(order, np.searchsorted(row[order], np.arange(1, len(documents))))
    with progress.task("Reading contexts", len(documents), "documents") as task:
        for index, start, rows, spans in zip(
            documents.tolist(),
            starts.tolist(),
            groups,
            corpus.spans_batch(documents.tolist()),
            strict=True,
        ):
            text = corpus.text(index)
            for place in rows.tolist():
                left, right = spans[position[place] - start]
                before[place] = text[max(0, left - CHARACTERS_BEFORE) : left]
                token[place] = text[left:right]
                after[place] = text[right : right + CHARACTERS_AFTER]
            task.advance()
    return [pa.array(column, pa.string()) for column in (before, token, after)]


def write_contexts(directory: Path, kept: Contexts) -> None:
    """Write ``contexts.safetensors``: unit states in bf16, row for row with the index."""
    path = directory / layout.CONTEXTS_FILE
    save_file({"states": kept.state.contiguous()}, str(path))
    share(path)


def write_prototypes(
    directory: Path, model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, scan: Scan
) -> None:
    """Write ``prototypes.parquet`` with names made of signatures, until labels replace them."""
    count = head.num_prototypes
    signatures = top_signatures(
        head.prototypes.detach().float(),
        weight_of(model).float(),
        float(head.scale.detach()),
        corpus.tokenizer,
    )
    nearest = scan.top.cosine[:, 0]
    nothing = pa.nulls(count, pa.string())
    table = pa.table(
        {
            "prototype": pa.array(np.arange(count, dtype=np.int32)),
            "name": pa.array(signatures.names),
            "description": nothing,
            "category": nothing,
            "role": nothing,
            "tags": pa.nulls(count, pa.list_(pa.string())),
            "top_tokens": pa.array(signatures.tokens, pa.list_(pa.string())),
            "top_values": pa.array(list(signatures.values), pa.list_(pa.float32())),
            "usage": pa.array(scan.mass.usage() / max(scan.tokens, 1)),
            "nearest_cosine": pa.array(
                nearest.numpy(), mask=torch.isinf(nearest).numpy(), type=pa.float32()
            ),
            "x": pa.nulls(count, pa.float32()),
            "y": pa.nulls(count, pa.float32()),
            "label_source": pa.array(["signature"] * count),
            "label_score": pa.nulls(count, pa.float32()),
        },
        schema=layout.PROTOTYPES_SCHEMA,
    )
    layout.write_table(table, directory / layout.PROTOTYPES_FILE)
