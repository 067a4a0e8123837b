"""What indexing a corpus would take: a few of its passes are timed, and multiplied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns
from prismlm.corpus.estimate import built, cost_of, draw
from prismlm.corpus.windows import split_counts
from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.index.build import IndexOptions, check_index
from prismlm.index.scan import Scan, ScanInput, scan_passes
from prismlm.index.spool import Spool
from prismlm.index.states import pass_tokens
from prismlm.index.write import lens_bytes
from prismlm.layers import PrototypeHead
from prismlm.models.evaluating import evaluating

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

PASSES_MEASURED = 6
# The columns of a context while the best are being kept, beside its hidden state.
BYTES_PER_KEPT = 34


def estimate_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    corpus: Corpus,
    options: IndexOptions | None = None,
    scale: float | None = 1.0,
) -> Cost:
    """Estimate what ``build_index`` with the same arguments would cost; writes nothing.

    The figures are ``documents`` to read, ``tokens`` to predict and ``tokens_per_second``.

    Args:
        model, head, corpus, options: as of ``build_index``.
        scale: how many times as much text there is as in ``corpus``; None: not known.

    Raises:
        InputError: what ``build_index`` would refuse.
    """
    options = options or IndexOptions()
    check_index(model, corpus, options)
    counted = split_counts(corpus, options.split)
    documents, tokens = (None if scale is None else round(scale * each) for each in counted)
    rate = _tokens_per_second(model, head, corpus, options)
    # An update holds the old top, the new candidates and the sorted copy at once.
    top = 3 * head.num_prototypes * options.contexts * (2 * head.width + BYTES_PER_KEPT)
    if tokens is not None and documents is not None:
        tokens -= documents
    return Cost(
        None if tokens is None else tokens / rate,
        peak_memory(model.device.type) + top,
        lens_bytes(head, options, documents, tokens),
        {"documents": documents, "tokens": tokens, "tokens_per_second": rate},
        basis="Measured on a few passes.",
    )


def estimate_dataset_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    tokenizer: PreTrainedTokenizerFast,
    dataset: HubDataset,
    options: IndexOptions,
    *,
    columns: Columns | None = None,
    skip_bad_rows: bool = False,
) -> Cost:
    """Estimate what an index of a dataset would cost; its part ``corpus`` is what comes before.

    Figures as of :func:`estimate_index`, None where the dataset does not say how much it holds.

    Raises:
        InputError: what reading the dataset or the index would raise, as far as it shows.
    """
    reader = DatasetReader(
        dataset, columns, tokenizer=tokenizer, skip_bad_rows=skip_bad_rows, answered_chats=True
    )
    sample = draw(reader)
    before = replace(cost_of(sample, tokenizer), name="corpus")
    with built(sample, tokenizer) as corpus:
        cost = estimate_index(model, head, corpus, options, sample.scale)
    return replace(cost, parts=(before,), unknown=sample.unknown)


def _tokens_per_second(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, options: IndexOptions
) -> float:
    given = ScanInput(model, head, corpus, options)
    scan = Scan.empty(given)
    # Nothing is written: so few positions wait in memory.
    scan.spool = None if options.positions is None else Spool(Path(), head.width)
    with evaluating(model):
        passes = scan_passes(scan, given, given.order.count)
        enough = PASSES_MEASURED * pass_tokens(model.device) // 2
        return rate_of(passes, seconds=60.0, enough=enough) or 1e4
