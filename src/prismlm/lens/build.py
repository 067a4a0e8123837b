"""Indexing: one pass over a corpus, in one or more parts, that writes a lens.

Workers read parts of the corpus (:mod:`prismlm.lens.scan`), then write ranges of cells, contexts,
documents and text (:mod:`prismlm.lens.assembly`). A last step, of one process, puts these together
and writes what does not grow with the corpus. :func:`index` opens model and corpus, and
:func:`build_index` takes open ones; :func:`index_in_parts` starts workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

import prismlm
from prismlm import fingerprints
from prismlm.allocator import keep_freed_memory
from prismlm.corpus.tokenizer import check_tokenizer_of
from prismlm.corpus.windows import split_counts
from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.errors import InputError
from prismlm.files import (
    address_of,
    atomic_directory,
    discard,
    room_to_write,
    share,
    write_json,
)
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.assembly import CENTRES, Assembly
from prismlm.lens.cell_files import spooled_type
from prismlm.lens.cells import Cells, CellsMeta, learn_codes, open_codes, record_type
from prismlm.lens.opened_model import check_embedded
from prismlm.lens.options import IndexOptions, Shard, options_for
from prismlm.lens.probe import Probe
from prismlm.lens.scan import HiddenStates, Scan, ScanInput, sample_states, scan_blocks, scan_part
from prismlm.lens.signatures import signatures_of
from prismlm.lens.support import measure_support
from prismlm.models.checkpoint import load_checkpoint
from prismlm.models.device import device_kind, device_named
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.parts import Engine, Parts, run_parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, Interrupts, writing

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

SECONDS_MEASURED = 10.0
# Bytes of a context on disk: compressed text and columns, or columns alone.
BYTES_WITH_TEXT, BYTES_WITHOUT_TEXT = 230, 30
# Bytes of a position for the key and first row of its range, which some four positions share.
BYTES_OF_RANGES = 4


def index(
    model: Path | str,
    corpus: Corpus | Path | str,
    lens: Path | str | None = None,
    options: IndexOptions | None = None,
    *,
    device: str = "auto",
    overwrite: bool = False,
    merge: bool = True,
    progress: Reporter = SILENT,
) -> Path | None:
    """Read a corpus with the model of a directory, and write a lens: ``prismlm index``.

    Args:
        model, corpus: directories; the model need not be trained on the corpus.
        lens: a name below ``MODEL/lens``, or a directory; by default the corpus's name.
        options: how it is read, and which part of it.
        device: auto, cpu or cuda.
        overwrite: replace an existing lens, and discard parts made with other inputs.
        merge: write the lens once all parts are finished. Without it, a part that another process
            reads is waited for, which is an error otherwise.
        progress: reports tokens.

    Returns:
        The lens, or None if other parts are missing or another process has just written it.
    """
    from prismlm.corpus.store import Corpus

    opened = corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)
    out = lens_directory(Path(model), lens or opened.name)
    check_lens(out, overwrite=overwrite)
    checkpoint = load_checkpoint(model, device=device_named(device))
    reader, sidecar = checkpoint.model, checkpoint.sidecar
    options = options_for(reader, options or IndexOptions(), Path(model))
    check_tokenizer_of(opened, checkpoint.tokenizer, Path(model).resolve().name)
    trained = sidecar.provenance.get("corpus")
    fingerprint = trained.get("fingerprint") if isinstance(trained, dict) else None
    same = None if fingerprint is None else fingerprint == opened.fingerprint
    return build_index(
        reader,
        sidecar.head,
        opened,
        out,
        options,
        trained_on=same,
        overwrite=overwrite,
        merge=merge,
        progress=progress,
    )


def build_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    out: Path | str,
    options: IndexOptions | None = None,
    *,
    trained_on: layout.TrainedOn = None,
    overwrite: bool = False,
    merge: bool = True,
    states: HiddenStates | None = None,
    progress: Reporter = SILENT,
) -> Path | None:
    """Index a corpus, or one part of it, with an open model, as :func:`index`.

    Finished parts, and then ranges of cells, are kept in ``.NAME.partial``. Whoever finishes the
    last of them writes the lens, which equals that of a single part. ``states`` of the same model,
    corpus and options are not computed again.
    """
    options, out = options_for(model, options or IndexOptions()), Path(out)
    check_index(model, corpus, options)
    check_lens(out, overwrite=overwrite)
    source, parts = ScanInput(model, corpus, options, head, states), Parts(out, options.shard.count)
    run, part = _run_settings(source), parts.part(options.shard.number)
    if model.device.type == "cpu":
        keep_freed_memory()
    room = room_to_write(f"the lens {out}", out.parent, lambda: f"Make room. {parts.kept()}")
    with evaluating(model), Interrupts(parts.kept) as interrupts, room:
        interrupts.now = True
        parts.check(run, overwrite=overwrite)
        with writing(part, wait=not merge):
            if not part.is_dir():
                check_lens(out, overwrite=overwrite)  # another process may have written it
                _make_part(source, parts, run, progress)
        if not merge:
            return None
        parts.check(run)
        assembly = Assembly(parts, corpus.path, options)
        assembly.make(assembly.jobs, wait=False, progress=progress)
        if not assembly.finished():  # another process makes the others, and then writes the lens
            return None
        with writing(parts.path, wait=True):
            if not parts.path.is_dir():  # another process has written the lens
                return None
            check_lens(out, overwrite=overwrite)
            with writing(out), atomic_directory(out) as directory:
                write_lens(directory, source, assembly, run | {"trained_on": trained_on}, progress)
            discard(parts.path)
    return out


@dataclass(frozen=True)
class IndexPart:
    """One part of an index, as a step of datatrove; arguments are those of :func:`index`.

    ``lens`` is a directory. With ``merge``, the last part to be finished writes the lens; without
    it, a part that another process reads is waited for.
    """

    model: Path
    corpus: Path
    lens: Path
    options: IndexOptions = field(default_factory=IndexOptions)
    device: str = "auto"
    overwrite: bool = False
    merge: bool = True

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read a part, unless it is finished."""
        # With ``overwrite`` a finished part may be of other inputs, and is checked.
        finished = Parts(self.lens, world_size).part(rank).is_dir()
        if self.merge or self.overwrite or not finished:
            options = replace(self.options, shard=Shard(rank, world_size))
            how: dict[str, Any] = {"overwrite": self.overwrite, "merge": self.merge}
            index(self.model, self.corpus, self.lens, options, device=self.device, **how)


def index_in_parts(
    part: IndexPart,
    count: int,
    *,
    engine: Engine = "local",
    workers: int = 1,
    progress: Reporter = SILENT,
) -> Path:
    """Index a corpus in parts, and then ranges of cells; finished ones are not made again.

    On machines of one kind the lens is the same, byte for byte, whatever the engine and the numbers
    of parts and workers; with bf16 on CPUs, at equal numbers of threads. Errors are those of
    :func:`prismlm.parts.run_parts` and :func:`index`.
    """
    # Workers may have another current directory.
    paths = {name: getattr(part, name).absolute() for name in ("model", "corpus", "lens")}
    part = replace(part, **paths)
    check_lens(part.lens, overwrite=part.overwrite)
    gpus = device_named(part.device) == "cuda"
    how: dict[str, Any] = {"engine": engine, "workers": workers, "progress": progress}
    run_parts(replace(part, merge=False), count, gpus=gpus, **how)
    jobs = Assembly(Parts(part.lens, count), part.corpus, part.options)
    counts = Counter(job.kind for job in jobs.jobs)
    if len(jobs.jobs) > len(counts):  # the last step does few jobs
        how["workers"] = min(workers, len(jobs.jobs))
        # A copy, without what it has read, since it is sent with each job.
        run_parts(replace(jobs, counts=dict(counts)), len(jobs.jobs), name="Files", **how)
    replace(part, merge=True)(None, 0, count)
    return part.lens


def _run_settings(source: ScanInput) -> dict[str, Any]:
    """Return the settings that all parts of a lens share."""
    options = source.options
    names = "split", "window", "stride", "contexts", "positions", "codes", "range_bytes"
    return {
        "model": fingerprints.of_model(source.model),
        "prototypes": layout.prototypes_fingerprint(source.head),
        "tokenizer": source.corpus.meta["tokenizer"]["fingerprint"],
        "corpus": source.corpus.fingerprint,
        **{name: getattr(options, name) for name in names},
        "precision": "bf16" if options.bf16 else "float32",
        "shards": options.shard.count,
        # Stored states are rounded, so parts with and without them differ.
        "states": None if source.states is None else len(source.states),
        # Another version, or GPU, may round differently.
        "prismlm": prismlm.__version__,
        "device": device_kind(source.model.device),
    }


def _make_part(source: ScanInput, parts: Parts, run: dict[str, Any], progress: Reporter) -> None:
    """Read a part; before the first one, learn the centers of product quantisation for all."""
    options, centres = source.options, parts.path / CENTRES
    if options.codes != "int8" and not centres.is_dir():
        with writing(centres, wait=True):
            if not centres.is_dir():
                with atomic_directory(centres) as directory:
                    write_json(directory / RUN_FILE, run)
                    learn_codes(directory, options.codes, sample_states(source))
    codes = open_codes(centres, options.codes, source.head.width)
    with atomic_directory(parts.part(options.shard.number)) as directory:
        write_json(directory / RUN_FILE, run)
        scan_part(directory, source, codes, progress)


def write_lens(
    directory: Path, source: ScanInput, assembly: Assembly, meta: dict[str, Any], progress: Reporter
) -> None:
    """Write all files of a lens whose jobs are finished."""
    model, head, corpus, options = source.model, source.head, source.corpus, source.options
    split, scan = options.split, assembly.scan(ranks=slice(1))
    Probe.measure(model, corpus, split, options.window).save(directory)
    entry, files = assembly.collect(directory)
    if "ranges" in entry:  # so that a reader, perhaps of a store, need not read all keys
        for name, counts in zip(
            layout.COUNT_FILES, (assembly.cells.counts, scan.following), strict=True
        ):
            np.save(directory / name, counts)
    cells = Cells(directory, entry)
    files = layout.describe_files(directory, files)
    support = measure_support(cells, model, head, corpus, split, progress)
    table = prototypes_table(model, head, corpus, scan)
    layout.write_prototypes(table, directory / layout.PROTOTYPES_FILE, files)
    known = {one.name for one in fields(layout.LensMeta)}
    meta = {name: value for name, value in meta.items() if name in known} | {
        "corpus_name": corpus.name,
        "corpus_path": str(corpus.path.resolve()),
        "documents": source.documents,
        "tokens": scan.tokens,
        "with_text": options.with_text,
        "convergence": scan.convergence(),
        "cells": entry,
        "support": None if support is None else asdict(support),
        "files": files,
    }
    layout.write_meta(directory, layout.LensMeta(**meta))
    share(directory)


def prototypes_table(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, scan: Scan
) -> pa.Table:
    """Return ``prototypes.parquet`` with names from signatures, before there are labels."""
    count, signatures = head.num_prototypes, signatures_of(model, head, corpus, scan.seen.numpy())
    nearest = scan.top.cosine[:, 0]
    columns: dict[str, Any] = dict.fromkeys(layout.PROTOTYPES_SCHEMA.names, [None] * count) | {
        "prototype": np.arange(count, dtype=np.int32),
        "name": signatures.names,
        "top_tokens": signatures.tokens,
        "top_values": list(signatures.values),
        "usage": scan.uses.numpy() / max(scan.tokens, 1),
        "nearest_cosine": pa.array(nearest.numpy(), mask=torch.isinf(nearest).numpy()),
        "label_source": ["signature"] * count,
    }
    return pa.table(columns, schema=layout.PROTOTYPES_SCHEMA)


def lens_directory(model: Path, lens: Path | str) -> Path:
    """Return the directory of a lens, given by name or path."""
    name = Path(lens).name
    if address_of(lens):
        raise InputError(f"--lens {lens} is in a store: write the lens to a disk, then copy it.")
    if name.startswith(".") or not name:
        raise InputError(f"--lens {lens} is not a name for a lens: it must not start with a dot.")
    return model / "lens" / lens if name == str(lens) else Path(lens)


def check_lens(out: Path, *, overwrite: bool) -> None:
    """Raise InputError unless a lens may be written to a directory."""
    if not out.exists():
        return
    if not overwrite:
        raise InputError(f"{out} exists. Choose another --lens, or pass --overwrite to replace it.")
    if not out.is_dir() or (any(out.iterdir()) and not (out / layout.META_FILE).is_file()):
        raise InputError(f"{out} is not a lens, so it is not replaced: choose another --lens.")


def check_index(model: PreTrainedModel, corpus: Corpus, options: IndexOptions) -> None:
    """Raise InputError unless a split of a corpus has documents, and the model all its tokens."""
    if split_counts(corpus, options.split)[0] == 0:
        raise InputError(
            f"the corpus {corpus.name} has no documents in its {options.split} split: index "
            "--split all, or build the corpus with another --heldout share."
        )
    if len(corpus.tokenizer) > weight_of(model).shape[0]:
        # Tokens without embeddings do no harm unless the text has them.
        largest = [int(part.max()) for part in corpus.parts()]
        check_embedded(model, corpus.tokenizer, largest, str(model.name_or_path))


def index_bytes(
    cells: CellsMeta, head: PrototypeHead, options: IndexOptions, documents: int, tokens: int
) -> tuple[int, int]:
    """Estimate the bytes of a lens of so many documents and predictions, and those of its parts."""
    per_context = BYTES_WITH_TEXT if options.with_text else BYTES_WITHOUT_TEXT
    contexts = head.num_prototypes * min(options.contexts, documents) * per_context
    per_position = record_type(cells).itemsize + BYTES_OF_RANGES
    # Tokens and their order, and a row for each document.
    text = (tokens + documents) * (cells.token_bytes + 4) + 24 * documents
    positions = round(tokens * options.positions)
    lens = contexts + positions * per_position + text * options.with_text
    return lens, positions * spooled_type(cells).itemsize


def estimate_index(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, options: IndexOptions
) -> Cost:
    """Time some passes of ``build_index``, and extrapolate to the corpus.

    The figures are ``documents``, ``tokens`` to predict, ``tokens_per_second``, and
    ``parts_bytes``, on disk until the lens is written.
    """
    options = options_for(model, options)
    check_index(model, corpus, options)
    source = ScanInput(model, corpus, options, head)
    codes = open_codes(None, options.codes, head.width)
    with evaluating(model):
        passes = scan_blocks(Scan.empty(source), source, range(source.order.count), codes)
        rate = rate_of(map(len, passes), SECONDS_MEASURED, enough=2**14) or 1e4
    documents, read = source.documents, round(source.predictions * options.positions)
    lens, parts = index_bytes(source.cells, head, options, documents, source.predictions)
    figures = {"documents": documents, "tokens": read, "tokens_per_second": rate}
    figures |= {"parts_bytes": parts}
    memory = peak_memory(model.device.type)
    return Cost(read / rate, memory, lens, figures, basis="Measured on a few passes.")
