"""One streaming pass over a corpus: which text each prototype stands for, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.errors import InputError
from prismlm.files import atomic_directory
from prismlm.layers import PrototypeHead
from prismlm.lens import layout
from prismlm.lens.index_files import write_contexts, write_index, write_prototypes
from prismlm.lens.mass import MassCounter
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.ops import prototype_head, top_contexts
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch


@dataclass(frozen=True)
class IndexOptions:
    """How a corpus is read.

    Attributes:
        contexts: L, the places kept per prototype; one per document.
        window: tokens of a window; at most what the model can read.
        stride: tokens between windows. A token sees at least window − stride tokens before it, or
            its document's start.
        tokens_per_batch: tokens of one forward pass.
        split: which documents to read.
        with_text: keep the text around each context, or offsets only.
    """

    contexts: int = 64
    window: int = 256
    stride: int = 128
    tokens_per_batch: int = 4096
    split: Split = "train"
    with_text: bool = True


@dataclass
class Scan:
    """What one pass over the corpus has found."""

    top: top_contexts.TopContexts
    mass: MassCounter
    tokens: int = 0


def build_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    out: Path | str,
    options: IndexOptions | None = None,
    *,
    trained_on: bool | None = None,
    overwrite: bool = False,
    progress: Reporter = SILENT,
) -> Path:
    """Index a corpus and write a lens directory; nothing is left behind if it is stopped.

    Every position that predicts a token of its document is scored against every prototype. The
    L nearest positions of each prototype are kept, one per document, ranked by cosine, then by
    position; uses and activations are summed over all positions.

    Args:
        model: the causal language model.
        head: its prototype head.
        corpus: the text; any corpus, also one the model was not trained on.
        out: the lens directory.
        options: window, stride, contexts, split.
        trained_on: whether the model was trained on this corpus, if that is known.
        overwrite: replace an existing lens.
        progress: shows tokens done.

    Raises:
        InputError: the lens exists, the corpus has no text in this split, its tokenizer is not
            the model's, or the window does not fit the model.
    """
    options = options or IndexOptions()
    out = Path(out)
    check_out(out, overwrite=overwrite)
    documents = corpus.split(options.split)
    check_index(model, corpus, documents, options)
    scan = scan_corpus(model, head, corpus, documents, options, progress)
    meta = _meta(model, head, corpus, options, scan, trained_on)
    kept = top_contexts.finish(scan.top)
    with atomic_directory(out) as temporary:
        write_index(temporary, kept, corpus, options.with_text, progress)
        write_contexts(temporary, kept)
        pq.write_table(scan.mass.table(), temporary / layout.MASS_FILE, compression="zstd")
        write_prototypes(temporary, model, head, corpus, scan)
        layout.write_meta(temporary, meta)
    return out


def _meta(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    options: IndexOptions,
    scan: Scan,
    trained_on: bool | None,
) -> layout.LensMeta:
    return layout.LensMeta(
        weight=fingerprints.of_tensor(weight_of(model)),
        prototypes=layout.prototypes_fingerprint(head),
        tokenizer=corpus.meta["tokenizer"]["fingerprint"],
        corpus=corpus.fingerprint,
        corpus_name=corpus.name,
        corpus_path=str(corpus.path.resolve()),
        split=options.split,
        trained_on=trained_on,
        window=options.window,
        stride=options.stride,
        contexts=options.contexts,
        documents=len(corpus.split(options.split)),
        tokens=scan.tokens,
        with_text=options.with_text,
    )


def scan_corpus(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    documents: np.ndarray,
    options: IndexOptions,
    progress: Reporter = SILENT,
) -> Scan:
    """Read the documents once; memory is set by K × L and one batch, not by the corpus."""
    from prismlm.corpus.windows import document_windows, window_batches

    groups, group_of = _groups(corpus)
    scan = Scan(
        top_contexts.empty(head.num_prototypes, options.contexts, head.width),
        MassCounter(groups, head.num_prototypes),
    )
    grid = document_windows(
        documents, corpus.starts, corpus.lengths, options.window, options.stride
    )
    batches = window_batches(grid, corpus, options.tokens_per_batch, corpus.eos_token_id)
    total = int(corpus.lengths[documents].sum() - len(documents))
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), progress.task("Indexing", total, "tokens") as task:
            for batch in batches:
                task.advance(_scan_batch(scan, model, head, batch, group_of, corpus.eos_token_id))
    finally:
        model.train(was_training)
    return scan


def _scan_batch(
    scan: Scan,
    model: PreTrainedModel,
    head: PrototypeHead,
    batch: WindowBatch,
    group_of: Tensor,
    eos_token_id: int,
) -> int:
    ids, attended = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    with capture(model, logits=False) as seen:
        model(input_ids=ids, attention_mask=attended.long(), use_cache=False)
    z = seen.z.float()
    # The end of a document predicts nothing of it.
    owned = batch.owned.to(z.device) & (ids != eos_token_id)
    found = prototype_head.scan_windows(z, head.prototypes, head.prototypes_per_token, owned)
    scale = head.scale
    activations = torch.relu(scale * found.cosines)
    rows, columns = owned.nonzero(as_tuple=True)
    group = group_of.to(z.device)[batch.document.to(z.device)[rows]]
    scan.mass.add(group.cpu(), found.indices[rows, columns].cpu(), activations[rows, columns].cpu())
    threshold = scan.top.threshold.to(z.device)
    window, prototype = ((found.best_cosine >= threshold) & (found.best_offset >= 0)).nonzero(
        as_tuple=True
    )
    offset = found.best_offset[window, prototype]
    cosine = found.best_cosine[window, prototype]
    state = z[window, offset]
    scan.top = top_contexts.update(
        scan.top,
        top_contexts.Contexts(
            prototype.cpu(),
            cosine.cpu(),
            batch.positions[window.cpu(), offset.cpu()],
            batch.document[window.cpu()],
            torch.relu(scale * cosine).cpu(),
            (found.indices[window, offset] == prototype[:, None]).any(1).cpu(),
            (state * inverse_norms(state)).bfloat16().cpu(),
        ),
    )
    scan.tokens += len(rows)
    return len(rows)


def _groups(corpus: Corpus) -> tuple[list[tuple[str | None, ...]], Tensor]:
    """Return the distinct (source, domain, licence) and the group of every document."""
    columns = [corpus.column(name) for name in layout.GROUP_COLUMNS]
    numbers: dict[tuple[str | None, ...], int] = {}
    of_document = [numbers.setdefault(key, len(numbers)) for key in zip(*columns, strict=True)]
    return list(numbers), torch.tensor(of_document, dtype=torch.int64)


def check_out(out: Path, *, overwrite: bool) -> None:
    """Check that a lens may be written to a directory.

    Raises:
        InputError: there is a lens and it is not to be replaced, or something else is there.
    """
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists. Choose another --lens, or pass --overwrite to replace it.")
    if out.exists() and any(out.iterdir()) and not (out / layout.META_FILE).is_file():
        raise InputError(f"{out} is not a lens, so it is not replaced: choose another --lens.")


def check_index(
    model: PreTrainedModel, corpus: Corpus, documents: np.ndarray, options: IndexOptions
) -> None:
    """Check that a corpus and options suit a model, before anything is read.

    Raises:
        InputError: an empty split, other tokens than the model's, or a window it cannot read.
    """
    if not len(documents):
        raise InputError(
            f"the corpus {corpus.name} has no documents in its {options.split} split: "
            "index --split all, or build the corpus with another --heldout share."
        )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and options.window > longest:
        raise InputError(
            f"a window of {options.window} tokens does not fit a model that reads {longest}: "
            f"pass --window {longest} or less."
        )
    vocabulary = weight_of(model).shape[0]
    if len(corpus.tokenizer) > vocabulary:
        raise InputError(
            f"the corpus {corpus.name} was tokenised with {len(corpus.tokenizer)} tokens and the "
            f"model has {vocabulary}: build the corpus with --tokenizer MODEL."
        )
