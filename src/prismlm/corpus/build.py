"""Building a corpus directory from texts, with any number of workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prismlm.corpus import layout
from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns
from prismlm.corpus.filters import Filters
from prismlm.corpus.part import CorpusPart
from prismlm.corpus.read import Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.writer import SHARD_TOKENS
from prismlm.errors import InputError, Interrupted, check_path, check_whole
from prismlm.files import check_room, discard
from prismlm.parts import Engine, Parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import writing

if TYPE_CHECKING:
    pass

# Bytes of a corpus, tokens and compressed text, per byte of text; compressed input gives more.
OUTPUT_PER_INPUT = 0.9


def build_corpus(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    filters: Filters | None = None,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
    parts: int | None = None,
    workers: int = 1,
    engine: Engine = "local",
    progress: Reporter = SILENT,
) -> Corpus:
    """Read the inputs and write a corpus directory at ``out``, reproducibly.

    Tokens, documents and fingerprint are the same for any numbers of parts and workers; the files
    they are in are the same for an equal number of parts. Finished parts of an interrupted build
    are not made again.

    Args:
        inputs: files and directories, as :func:`read_documents` takes them; or a dataset.
        out: the directory to write. It appears when it is complete, or not at all.
        tokenizer: a directory or Hugging Face name. None trains a byte-level BPE tokenizer on up
            to 64 million characters of the documents, sampled by the hash of their ids.
        vocab_size: the size of a trained vocabulary; ignored with ``tokenizer``.
        columns: which columns hold the text and its metadata.
        heldout_fraction: the share of documents to hold out, in [0, 1); it does not apply to
            documents with a ``split``.
        shard_tokens: the maximum size of a shard, unless a single document exceeds it.
        filters: which documents to leave out; ``corpus.json`` counts them by reason.
        overwrite: replace ``out`` if it is a corpus, and unfinished parts of another input.
        skip_bad_rows: leave out rows that cannot be used; ``corpus.json`` counts them by reason.
        parts: into how many parts to divide the input (default: one for each 256 MiB of files or
            file of a streamed dataset, and at least one for each worker).
        workers, engine: what makes the parts, as :func:`prismlm.parts.run_parts` does.
        progress: where to show the progress.

    Raises:
        InputError: an argument or an input cannot be used; see :class:`DocumentReader`.
    """
    target = check_path("the corpus to write", out)
    with writing(target):
        part = CorpusPart(
            target,
            tokenizer,
            inputs,
            vocab_size=vocab_size,
            columns=Columns() if columns is None else columns,
            heldout_fraction=heldout_fraction,
            shard_tokens=check_whole("the number of tokens in a shard", shard_tokens, 1),
            filters=filters or Filters(),
            skip_bad_rows=skip_bad_rows,
            overwrite=overwrite,
        )
        part.check()
        reader = part.open_inputs(inputs)
        size = OUTPUT_PER_INPUT * sum(file.size for file in reader.files)
        check_room(f"the corpus {target}", target, size, part.partial)
        check_whole("the number of workers", workers, 1)
        count = max(workers, reader.default_parts()) if parts is None else parts
        if workers > 1 or engine != "local":
            part = part.absolute()
        with _cleanup(Parts(target, check_whole("the number of parts", count, 1))):
            part.list_inputs(count, reader).build(count, engine, workers, progress)
    return Corpus.open(target)


@contextmanager
def _cleanup(parts: Parts) -> Iterator[None]:
    """Remove what no later run can use after a failure; on Ctrl-C, name what is kept."""
    try:
        yield
    except BaseException as error:
        useful = (layout.META_FILE, "part-*")
        if not isinstance(error, InputError):
            useful += ("steps/*.parquet", "steps/minhash/*.done", "tokenizer")
        if parts.path.is_dir() and not any(any(parts.path.glob(name)) for name in useful):
            discard(parts.path)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(parts.kept()) from error
        raise
