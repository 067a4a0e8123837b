"""Writing what a scan has found: contexts with their text, states, prototypes, cells."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from prismlm.corpus.layout import FACTS
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.cells import Cells
from prismlm.lens.codes import parts_of
from prismlm.lens.probe import Probe
from prismlm.lens.scan import ABSENT, IndexOptions, Scan, ScanInput, mass_table
from prismlm.lens.signatures import signatures_of
from prismlm.lens.sort_cells import Spool, write_cells, write_documents
from prismlm.lens.suffixes import write_suffixes
from prismlm.lens.support import measure_support
from prismlm.models.sidecar import weight_of
from prismlm.ops import top_contexts
from prismlm.ops.top_contexts import Contexts
from prismlm.progress import Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

CHARACTERS_BEFORE, CHARACTERS_AFTER = 160, 80
FACTS_NAMED = [name for name, _ in FACTS]
# Bytes of a kept context on disk: its compressed text and columns, and those columns alone.
BYTES_WITH_TEXT = 230
BYTES_WITHOUT_TEXT = 30
BYTES_PER_PROTOTYPE = 200
# Of a position, beside its coded state: offset, probability, scale, and its part of the ranges.
BYTES_PER_POSITION = 16


def write_lens(
    directory: Path,
    given: ScanInput,
    scan: Scan,
    spools: list[Spool],
    meta: dict[str, Any],
    progress: Reporter,
) -> None:
    """Write all files of a lens."""
    kept, options, corpus = top_contexts.finish(scan.top), given.options, given.corpus
    model, head, split = given.model, given.head, options.split
    write_index(directory, kept, corpus, options.with_text, progress)
    # Unit states in bf16, row for row with the index.
    save_file({"states": kept.state.contiguous()}, str(directory / layout.CONTEXTS_FILE))
    layout.write_table(mass_table(scan.mass, given.groups.keys), directory / layout.MASS_FILE)
    Probe.of(model, corpus, split, options.window).save(directory)
    if options.with_text:
        write_suffixes(directory, corpus, split)
    write_documents(directory, corpus, split)
    cells = write_cells(
        directory,
        spools,
        head.num_prototypes,
        len(weight_of(model)),
        options.positions,
        progress,
        codes=options.codes,
        tokens=corpus.num_tokens,
    )
    scale = measure_support(Cells(directory, cells), model, head, corpus, split, progress)
    files = layout.describe_files(directory)
    prototypes = prototypes_table(model, head, corpus, scan)
    layout.write_prototypes(prototypes, directory / layout.PROTOTYPES_FILE, files)
    meta |= {"tokens": scan.tokens, "convergence": convergence(scan), "files": files}
    meta |= {"cells": cells, "support": None if scale is None else asdict(scale)}
    layout.write_meta(directory, layout.LensMeta(**meta))


def lens_bytes(
    head: PrototypeHead, options: IndexOptions, documents: int | None, tokens: int | None
) -> int:
    """Return about how many bytes a lens of so many documents and tokens has; None: at most."""
    contexts = options.contexts if documents is None else min(options.contexts, documents)
    per_context = 2 * head.width + (BYTES_WITH_TEXT if options.with_text else BYTES_WITHOUT_TEXT)
    state = head.width if options.codes == "int8" else parts_of(head.width, options.codes)
    positions = (tokens or 0) * options.positions * (state + BYTES_PER_POSITION)
    return head.num_prototypes * (contexts * per_context + BYTES_PER_PROTOTYPE) + int(positions)


def convergence(scan: Scan) -> list[dict[str, float]]:
    """Return the mean nearest cosine of the prototypes after growing shares of the corpus."""
    points: list[dict[str, float]] = []
    for tokens, nearest in zip(scan.curve_tokens.tolist(), scan.curve_nearest, strict=True):
        seen = nearest[nearest > ABSENT].double()
        if len(seen):
            share, mean = tokens / max(scan.tokens, 1), float(seen.mean())
            points.append({"tokens": tokens, "share": share, "mean_nearest_cosine": mean})
    return points


def write_index(
    directory: Path, kept: Contexts, corpus: Corpus, with_text: bool, progress: Reporter
) -> None:
    """Write ``index.parquet``, by prototype and then by rank."""
    prototype = kept.prototype.numpy()
    rank = np.arange(len(prototype)) - np.searchsorted(prototype, prototype)
    documents, row = np.unique(kept.document.numpy(), return_inverse=True)
    texts = [pa.nulls(len(row), pa.string())] * 3
    if with_text:
        texts = _texts(corpus, documents, row, kept.position.numpy(), progress)
    table = pa.table(
        [
            pa.array(prototype.astype(np.int32)),
            pa.array(rank.astype(np.int32)),
            pa.array(kept.cosine.numpy()),
            pa.array(kept.activation.numpy()),
            pa.array(kept.routed.numpy()),
            pa.array(kept.position.numpy()),
            *corpus.documents.take(documents).select(FACTS_NAMED).take(pa.array(row)).columns,
            *texts,
        ],
        schema=layout.INDEX_SCHEMA,
    )
    layout.write_table(table, directory / layout.INDEX_FILE, row_group_size=8192)


def _texts(
    corpus: Corpus,
    documents: np.ndarray,
    row: np.ndarray,
    position: np.ndarray,
    progress: Reporter,
) -> list[pa.Array]:
    """Return before, token and after for every context; each document is encoded once."""
    before, token, after = ([""] * len(row) for _ in range(3))
    order = np.argsort(row, kind="stable")
    groups = np.split(order, np.searchsorted(row[order], np.arange(1, len(documents))))
    with progress.task("Reading contexts", len(documents), "documents") as task:
        for number, rows in zip(documents.tolist(), groups, strict=True):
            text, spans, start = corpus.text(number), corpus.spans(number), corpus.starts[number]
            for place in rows.tolist():
                left, right = spans[position[place] - start]
                before[place] = text[max(0, left - CHARACTERS_BEFORE) : left]
                token[place] = text[left:right]
                after[place] = text[right : right + CHARACTERS_AFTER]
            task.advance()
    return [pa.array(column, pa.string()) for column in (before, token, after)]


def prototypes_table(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, scan: Scan
) -> pa.Table:
    """Return ``prototypes.parquet`` with names made of signatures, until labels replace them."""
    count, signatures = head.num_prototypes, signatures_of(model, head, corpus)
    nearest = scan.top.cosine[:, 0]
    known = {
        "prototype": pa.array(np.arange(count, dtype=np.int32)),
        "name": pa.array(signatures.names),
        "top_tokens": pa.array(signatures.tokens, pa.list_(pa.string())),
        "top_values": pa.array(list(signatures.values), pa.list_(pa.float32())),
        "usage": pa.array(scan.usage / max(scan.tokens, 1)),
        "nearest_cosine": pa.array(
            nearest.numpy(), mask=torch.isinf(nearest).numpy(), type=pa.float32()
        ),
        "label_source": pa.array(["signature"] * count),
    }
    schema = layout.PROTOTYPES_SCHEMA
    columns = [known.get(one.name, pa.nulls(count, one.type)) for one in schema]
    return pa.table(columns, schema=schema)
