"""Writing what a scan has found: contexts with the text around them, states, prototypes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.signatures import top_signatures
from prismlm.models.sidecar import weight_of
from prismlm.ops.top_contexts import Contexts
from prismlm.progress import Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.lens.index import Scan

CHARACTERS_BEFORE = 160
CHARACTERS_AFTER = 80


def write_index(
    directory: Path, kept: Contexts, corpus: Corpus, with_text: bool, progress: Reporter
) -> None:
    """Write ``index.parquet``, by prototype and then by rank."""
    prototype = kept.prototype.numpy()
    first = np.searchsorted(prototype, prototype)
    document = kept.document.numpy()
    texts = (
        _texts(corpus, document, kept.position.numpy(), progress)
        if with_text
        else [pa.nulls(len(document), pa.string())] * 3
    )
    metadata = [
        pa.array([column[d] for d in document], pa.string())
        for column in map(corpus.column, ("doc_id", "source", "domain", "license", "title", "url"))
    ]
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
    pq.write_table(table, directory / layout.INDEX_FILE, compression="zstd", row_group_size=8192)


def _texts(
    corpus: Corpus, document: np.ndarray, position: np.ndarray, progress: Reporter
) -> list[pa.Array]:
    """Return before, token and after for every context; each document is encoded once."""
    before, token, after = ([""] * len(document) for _ in range(3))
    order = np.argsort(document, kind="stable")
    documents, starts = np.unique(document[order], return_index=True)
    groups = np.split(order, starts[1:])
    with progress.task("Reading contexts", len(documents), "documents") as task:
        for index, rows, spans in zip(
            documents.tolist(), groups, corpus.spans_batch(documents.tolist()), strict=True
        ):
            text, start = corpus.text(index), int(corpus.starts[index])
            for row in rows.tolist():
                left, right = spans[position[row] - start]
                before[row] = text[max(0, left - CHARACTERS_BEFORE) : left]
                token[row] = text[left:right]
                after[row] = text[right : right + CHARACTERS_AFTER]
            task.advance()
    return [pa.array(column, pa.string()) for column in (before, token, after)]


def write_contexts(directory: Path, kept: Contexts) -> None:
    """Write ``contexts.safetensors``: unit states in bf16, row for row with the index."""
    save_file({"states": kept.state.contiguous()}, str(directory / layout.CONTEXTS_FILE))


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
    pq.write_table(table, directory / layout.PROTOTYPES_FILE, compression="zstd")
