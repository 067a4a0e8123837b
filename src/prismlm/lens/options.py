"""How a corpus is read for a lens, and how the model itself was trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from prismlm.corpus.store import Corpus
from prismlm.errors import InputError, check_number, check_whole
from prismlm.files import read_json
from prismlm.lens.cells import CodeName, check_codes
from prismlm.models.sidecar import META_FILE

if TYPE_CHECKING:
    from prismlm.corpus.store import Split

MAX_DEFAULT_WINDOW = 1024
# Written by ``prismlm train``, for models without a head too.
RUN_FILE = "training.json"


@dataclass(frozen=True)
class Shard:
    """One part of an index, from 0, and the number of parts."""

    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class IndexOptions:
    """How a corpus is read."""

    contexts: int = 64  # L, the positions kept per prototype, one per document
    # Tokens of a window; 0: as in training if known, otherwise what the model reads, up to 1,024.
    window: int = 0
    # Tokens between windows; 0: three quarters of a window. A token sees at least window − stride
    # tokens before it, or its document's start.
    stride: int = 0
    split: Split = "train"
    with_text: bool = True  # keep the text around each context, and a suffix array of the tokens
    # The share of windows that is read; contexts, uses and cells are all of this sample.
    positions: float = 1.0
    codes: CodeName = "int8"  # of their hidden states, or pq for a quarter of the size
    bf16: bool = False  # forward passes in bfloat16 (autocast)
    shard: Shard = Shard()
    # Stored records of a range of cells, at most; tests lower it.
    range_bytes: int = 2**30


def options_for(
    model: PreTrainedModel, options: IndexOptions, path: Path | None = None
) -> IndexOptions:
    """Fill in window and stride for a model, and its directory if given; InputError if invalid."""
    for name, least in (("contexts", 1), ("window", 0), ("stride", 0)):
        check_whole(f"--{name}", getattr(options, name), least)
    check_whole("the part to read", options.shard.number, 0, options.shard.count - 1)
    reads = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = min(reads or MAX_DEFAULT_WINDOW, MAX_DEFAULT_WINDOW)
    window = options.window or (path and trained_length(path)) or longest
    check_share(options.positions)
    check_codes(options.codes)
    if reads is not None and window > reads:
        raise InputError(
            f"a window of {window} tokens does not fit a model that reads {reads}: "
            f"pass --window {reads} or less."
        )
    stride = options.stride or max(1, window * 3 // 4)
    return replace(options, window=window, stride=check_whole("--stride", stride, 1, window))


def check_share(share: float) -> None:
    """Raise InputError unless a share of windows is above 0 and at most 1."""
    expected = "a share of the corpus's windows, above 0 and up to 1"
    check_number("--positions", share, expected, lambda number: 0 < number <= 1)


def training_corpus(directory: Path | str) -> Corpus:
    """Open the corpus that a model directory was trained on.

    A relative path in its recipe is relative to the current directory.
    """
    record = _training_record(Path(directory))
    path = (record.get("recipe") or {}).get("corpus")
    if path is not None and Path(path).is_dir():
        corpus = Corpus.open(path)
        if (record.get("corpus") or {}).get("fingerprint") in (None, corpus.fingerprint):
            return corpus
    raise InputError(
        f"the corpus that {directory} was trained on ({path or 'not recorded'}) is not there, or "
        "has changed. Name it with --corpus DIR."
    )


def trained_length(directory: Path | str) -> int | None:
    """Return the tokens of a training row, or None if the model directory does not say."""
    data = (_training_record(Path(directory)).get("recipe") or {}).get("data") or {}
    return data.get("length")


def _training_record(directory: Path) -> dict[str, Any]:
    for name in (META_FILE, RUN_FILE):
        if (directory / name).is_file():
            value = read_json(directory / name)
            record = value.get("provenance") if name == META_FILE else value
            if isinstance(record, dict) and "recipe" in record:
                return record
    return {}
