"""What indexing a corpus would cost, from running a few of its passes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from prismlm.corpus.build import build_corpus
from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns, stated_part
from prismlm.corpus.estimate import cost_of, sample_stream
from prismlm.corpus.windows import PASS_TOKENS, split_counts
from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.files import json_text
from prismlm.index.build import IndexOptions, check_index
from prismlm.index.scan import Scan, ScanInput, scan_passes
from prismlm.index.spool import Spool
from prismlm.index.write import lens_bytes
from prismlm.layers import PrototypeHead
from prismlm.models.evaluating import evaluating

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus

PASSES_MEASURED = 6
CHARACTERS_READ_PER_SECOND = 3_000_000
CHARACTERS_PER_TOKEN = 4
# The columns of a context while the best are being kept, beside its hidden state.
BYTES_PER_KEPT = 34


def estimate_index(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, options: IndexOptions | None = None
) -> Cost:
    """Estimate what ``build_index`` with the same arguments would cost; writes nothing.

    A few forward passes of the first blocks are scanned, after one that warms up. The figures are
    ``documents`` to read, ``tokens`` to predict and ``tokens_per_second``.

    Raises:
        InputError: what ``build_index`` would refuse.
    """
    options = options or IndexOptions()
    check_index(model, corpus, options)
    documents, tokens = split_counts(corpus, options.split)
    tokens -= documents
    rate = _tokens_per_second(model, head, corpus, options)
    kept = head.num_prototypes * min(options.contexts, documents)
    # Only the documents of kept contexts are read again.
    read = min(tokens, kept * tokens / max(1, documents)) if options.with_text else 0.0
    # An update holds the old top, the new candidates and the sorted copy at once.
    top = 3 * head.num_prototypes * options.contexts * (2 * head.width + BYTES_PER_KEPT)
    return Cost(
        tokens / rate + read * CHARACTERS_PER_TOKEN / CHARACTERS_READ_PER_SECOND,
        peak_memory(model.device.type) + top,
        lens_bytes(head, options, documents, tokens),
        {"documents": documents, "tokens": tokens, "tokens_per_second": rate},
    )


def estimate_dataset_index(
    model: PreTrainedModel,
    head: PrototypeHead,
    tokenizer: PreTrainedTokenizerFast,
    dataset: HubDataset,
    options: IndexOptions,
    *,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
) -> Cost:
    """Estimate what an index of a dataset would cost; its part ``corpus`` is what comes before.

    The first documents are read, tokenised and a few of them indexed, in a temporary directory
    that is removed; nothing else is written. Figures as of :func:`estimate_index`, those of the
    dataset None where it does not say how much it holds.

    Raises:
        InputError: what reading the dataset or the index would raise, as far as it shows in them.
    """
    sample = sample_stream(dataset, columns, tokenizer)
    with tempfile.TemporaryDirectory() as directory:
        own, first = Path(directory, "tokenizer"), Path(directory, "first.jsonl")
        tokenizer.save_pretrained(own)
        expected = replace(cost_of(sample, own), name="corpus")
        with first.open("w", encoding="utf-8") as file:
            for document in sample.documents:
                row = {"id": document.doc_id, "text": document.text, "source": document.source}
                file.write(json_text(row) + "\n")
        corpus = build_corpus(first, Path(directory, "corpus"), tokenizer=own, heldout_fraction=0)
        measured = estimate_index(model, head, corpus, replace(options, split="all"))
    stated = [stated_part(one) for one in sample.documents]
    held = fmean(heldout_fraction if part is None else part == "heldout" for part in stated)
    read = {"train": 1 - held, "heldout": held, "all": 1.0}[options.split]
    tokens = documents = None
    if expected.tokens is not None:
        documents = int(read * expected.documents)
        tokens = int(read * (expected.tokens - expected.documents))
    rate = measured.tokens_per_second
    return Cost(
        None if tokens is None else tokens / rate,
        measured.memory_bytes,
        lens_bytes(head, options, documents, tokens),
        {
            "sampled_documents": expected.sampled_documents,
            "bytes_per_token": expected.bytes_per_token,
            "tokens": tokens,
            "tokens_per_second": rate,
        },
        parts=(expected,),
        unknown=expected.unknown,
    )


def _tokens_per_second(
    model: PreTrainedModel, head: PrototypeHead, corpus: Corpus, options: IndexOptions
) -> float:
    given = ScanInput(model, head, corpus, options)
    scan = Scan.empty(given)
    # Nothing is written: so few positions wait in memory.
    scan.spool = None if options.positions is None else Spool(Path(), head.width)
    with evaluating(model):
        passes = scan_passes(scan, given, given.order.count)
        enough = PASSES_MEASURED * PASS_TOKENS // 2
        return rate_of(passes, seconds=60.0, enough=enough) or 1e4
