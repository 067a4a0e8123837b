"""Building a corpus directory, and estimating its cost from a sample.

Closed shards are kept in ``.NAME.partial`` beside the corpus until it is complete. After an
interruption the same command reads its input again and tokenises the documents after them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import MIN_VOCABULARY, fingerprint, load_tokenizer, train_tokenizer
from prismlm.corpus.writer import CorpusWriter
from prismlm.cost import Cost, peak_memory
from prismlm.errors import (
    FormatError,
    InputError,
    Interrupted,
    check_kind,
    check_number,
    check_path,
    check_whole,
)
from prismlm.files import WAY_OUT, atomic_directory, check_room, room_to_write, write_json
from prismlm.outputs import check_outputs
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import check_same, read_note, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Bytes of a corpus, tokens and compressed text, per byte of text; compressed input gives more.
OUTPUT_PER_INPUT = 0.9
TRAINING_CHARACTERS = 64_000_000
SHARD_TOKENS = 2**27
STATE_FILE, STATE_VERSION = "build.json", 5
READING_SECONDS = 5.0
SAMPLE_CHARACTERS = 500_000


def build_corpus(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
    reuse: bool = False,
    wait: bool = False,
    progress: Reporter = SILENT,
) -> Corpus:
    """Read the inputs and write a corpus directory at ``out``, reproducibly.

    Args:
        inputs: files and directories, as :func:`read_documents` takes them; or a dataset.
        out: the directory to write. It appears when it is complete, or not at all.
        tokenizer: a directory or Hugging Face name. None trains a byte-level BPE tokenizer on up
            to 64 million characters of the documents, sampled by the hash of their ids.
        vocab_size: the size of a trained vocabulary; ignored with ``tokenizer``.
        columns: which columns hold the text and its metadata.
        heldout_fraction: the share of documents to hold out, in [0, 1); it does not apply to
            documents with a ``split``.
        shard_tokens: the maximum size of a shard, unless a single document exceeds it; also the
            most that an interruption loses.
        overwrite: replace ``out`` if it is a corpus, and a partial build of it.
        skip_bad_rows: leave out rows that cannot be used; ``corpus.json`` counts them by reason.
        reuse: open ``out`` if it is the corpus of the same dataset and settings; changes to the
            dataset itself are not noticed.
        wait: wait until no other process writes ``out``, instead of refusing.
        progress: where to show the progress, in bytes of files or rows of a dataset.

    Raises:
        InputError: an argument or an input cannot be used; see :class:`DocumentReader`.
    """
    target = check_path("the corpus to write", out)
    with writing(target, wait=wait):
        loaded = None
        if reuse and isinstance(inputs, HubDataset) and tokenizer is not None:
            loaded = load_tokenizer(tokenizer)
            existing = existing_corpus(inputs, target, loaded, columns, heldout_fraction)
            if existing is not None:
                return existing
        _check_build(target, tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
        reader = open_reader(inputs, columns, skip_bad_rows)
        _check_target(target, inputs, reader)
        if tokenizer is None:
            loaded = _train(reader, vocab_size, progress)
        reader.tokenizer = loaded = loaded or load_tokenizer(str(tokenizer))
        writer = CorpusWriter(
            _partial(target), loaded, heldout_fraction=heldout_fraction, shard_tokens=shard_tokens
        )
        origin = _origin(inputs, reader, columns) | {"tokenizer": writer.meta["fingerprint"]}
        origin["heldout_fraction"] = heldout_fraction
        with room_to_write(f"the corpus {target}", target.parent, WAY_OUT):
            _write(reader, writer, origin, target, progress, overwrite=overwrite)
    return Corpus.open(target)


def existing_corpus(
    dataset: HubDataset,
    out: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerFast,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
) -> Corpus | None:
    """Return the corpus that :func:`build_corpus` with ``reuse`` would open, or None."""
    if not layout.is_corpus(Path(out)):
        return None
    corpus = Corpus.open(out)
    if "origin" not in corpus.meta:
        raise InputError(
            f"{out} is a corpus that was built from files, not from a dataset. Choose another "
            "--corpus."
        )
    settings = {"tokenizer": fingerprint(tokenizer), "heldout_fraction": heldout_fraction}
    origin = dataset.origin(columns) | settings
    _check_same(f"{out} is a corpus that was built", corpus.meta["origin"], origin)
    return corpus


def _origin(
    inputs: Paths | HubDataset, reader: DocumentReader, columns: Columns | None
) -> dict[str, Any]:
    if isinstance(inputs, HubDataset):
        return inputs.origin(columns)
    files = [
        [os.path.realpath(file.path) if isinstance(file.path, Path) else str(file.path), file.size]
        for file in reader.files
    ]
    return {"files": fingerprints.of_json([files, asdict(columns or Columns())])}


def open_reader(
    inputs: Paths | HubDataset,
    columns: Columns | None,
    skip_bad_rows: bool,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> DocumentReader:
    """Return a reader of the inputs of a corpus, which leaves out chats without an answer."""
    reader_type: Any = DatasetReader if isinstance(inputs, HubDataset) else DocumentReader
    return reader_type(
        inputs, columns, tokenizer=tokenizer, skip_bad_rows=skip_bad_rows, answered_chats=True
    )


def _check_build(
    out: Path,
    tokenizer: str | os.PathLike[str] | None,
    vocab_size: int,
    heldout_fraction: float,
    shard_tokens: int,
    overwrite: bool,
) -> None:
    """Raise InputError for arguments that a build would refuse, before anything is read."""
    if tokenizer is None:
        check_whole("the vocabulary size", vocab_size, MIN_VOCABULARY)
    else:
        check_kind("the tokenizer", tokenizer, (str, os.PathLike), "a directory or a name")
    expected = "at least 0 and below 1"
    check_number("the held-out fraction", heldout_fraction, expected, lambda share: 0 <= share < 1)
    check_whole("the number of tokens in a shard", shard_tokens, 1)
    check_kind("overwrite", overwrite, bool, "True or False")
    check_outputs(directory=out, overwrite=True)
    if out.exists() and not layout.is_corpus(out):
        raise InputError(
            f"{out} exists and is not a corpus, so it is not replaced. Choose another directory."
        )
    if out.exists() and not overwrite:
        raise InputError(
            f"{out} exists. Choose another directory, or replace it with --overwrite "
            "(in Python: overwrite=True)."
        )


def _check_target(out: Path, inputs: Paths | HubDataset, reader: DocumentReader) -> None:
    """Raise InputError if the corpus would replace its own input, or does not fit on the disk."""
    named = [inputs.name, *inputs.data_files] if isinstance(inputs, HubDataset) else []
    local = (file.path for file in reader.files if isinstance(file.path, Path))
    for path in [*map(Path, named), *local]:
        if path.exists() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out)):
            raise InputError(
                f"{path} lies in {out}, which the corpus would replace. Choose another directory."
            )
    size = sum(file.size for file in reader.files)
    check_room(f"the corpus {out}", out, size * OUTPUT_PER_INPUT, _partial(out))


def _partial(target: Path) -> Path:
    """Return the directory of the closed shards of a corpus that is not complete yet."""
    return target.with_name(f".{target.name}.partial")


def _train(reader: DocumentReader, vocab_size: int, progress: Reporter) -> PreTrainedTokenizerFast:
    def documents() -> Iterator[Document]:
        done = 0
        for number, document in enumerate(reader):
            yield document
            if number % 256 == 0:
                task.advance(reader.done - done)
                done = reader.done

    with progress.task("Sampling text", reader.total, reader.unit) as task:
        sample = sample_documents(documents(), TRAINING_CHARACTERS)
    with progress.task("Training the tokenizer", None, "tokens"):
        return train_tokenizer((document.text for document in sample), vocab_size)


def sample_documents(documents: Iterable[Document], max_characters: int) -> list[Document]:
    """Choose documents of at most so many characters: those with the smallest hashes of their ids.

    Memory is bounded, all parts of the input are sampled alike and the sample is reproducible.
    """
    heap, size = list[tuple[int, int, Document]](), 0
    for number, document in enumerate(documents):
        key = int.from_bytes(hashlib.sha256(document.doc_id.encode()).digest()[8:16], "little")
        heappush(heap, (-key, number, document))
        size += len(document.text)
        while size > max_characters and len(heap) > 1:
            size -= len(heappop(heap)[2].text)
    return [document for _, _, document in sorted(heap, key=itemgetter(1))]


def _write(
    reader: DocumentReader,
    writer: CorpusWriter,
    origin: dict[str, Any],
    target: Path,
    progress: Reporter,
    *,
    overwrite: bool,
) -> None:
    """Write the corpus of all documents, resuming an earlier run on the same input."""
    partial = _partial(target)
    state = _resumed_state(partial, origin, overwrite)
    with _cleanup(partial), writer, progress.task("Tokenising", reader.total, reader.unit) as task:
        documents, done = iter(reader), 0
        if state:
            writer.resume(state["shards"], state["digest"], state["written"], documents)
            task.note(f"{writer.num_documents:,} documents were kept")
        closed = len(writer.shards)
        for _ in writer.write(documents):
            if len(writer.shards) > closed:
                closed = len(writer.shards)
                state = {"version": STATE_VERSION, "origin": origin, "shards": writer.shards}
                state |= {"digest": writer.closed_digest, "written": writer.fingerprints}
                write_json(partial / STATE_FILE, state)
            task.advance(reader.done - done)
            done = reader.done
        more = {"read": reader.manifest()} if reader.files else {"origin": origin}
        writer.finish(reader.left_out, **more)
    (partial / STATE_FILE).unlink(missing_ok=True)
    with atomic_directory(target) as empty:
        os.replace(partial, empty)


def _resumed_state(partial: Path, origin: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Return the state of an earlier run on the same input; otherwise {}, with an empty directory.

    ``overwrite`` discards a run on another input instead of refusing it.
    """
    state: dict[str, Any] = {}
    if (partial / STATE_FILE).is_file():
        try:
            state = read_note(partial / STATE_FILE, partial, version=STATE_VERSION)
        except FormatError:
            if not overwrite:
                raise
        if state and not overwrite:
            _check_same(f"{partial} holds a corpus that was begun", state["origin"], origin)
    if state.get("origin") == origin:
        return state
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return {}


def _check_same(what: str, before: dict[str, Any], origin: dict[str, Any]) -> None:
    way_out = "Resume that one, write to another directory, or remove it."
    check_same(f"{what} from another input", before, origin, way_out)


@contextmanager
def _cleanup(partial: Path) -> Iterator[None]:
    """Remove a partial corpus without closed shards after a failure; name the others on Ctrl-C."""
    try:
        yield
    except BaseException as error:
        if not (partial / STATE_FILE).is_file():
            shutil.rmtree(partial, ignore_errors=True)
        elif isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"the closed shards are kept in {partial}. Run the same command again to resume."
            ) from error
        raise


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Documents of the first seconds of reading, and estimates for the whole input.

    Attributes:
        documents: at most about half a million characters of them.
        scale: how many times as much text the inputs hold; None if unknown.
        num_documents: how many documents the inputs hold, counted or extrapolated.
        seconds: the time to read all of them, including the network.
        unknown: caveats, as sentences.
    """

    documents: list[Document]
    scale: float | None
    num_documents: int | None
    seconds: float | None
    unknown: tuple[str, ...] = ()


def draw_sample(reader: DocumentReader) -> Sample:
    """Read for some seconds and sample documents evenly; small inputs are read completely."""
    seen, characters, share = 0, 0, 1.0
    began = time.perf_counter()

    def first_documents() -> Iterator[Document]:
        nonlocal seen, characters, share
        for document in reader:
            seen += 1
            characters += len(document.text)
            yield document
            if time.perf_counter() - began > READING_SECONDS:
                share = reader.done / reader.total if reader.total else 0.0
                return

    documents = sample_documents(first_documents(), SAMPLE_CHARACTERS)
    if not share:
        like = f"Whether the rest is like the first {seen:,} documents."
        more = "How much the dataset holds: it does not say before it is read."
        return Sample(documents, None, None, None, (like, more))
    seconds = (time.perf_counter() - began) / share
    scale = characters / share / sum(len(document.text) for document in documents)
    return Sample(documents, scale, round(seen / share), seconds)


@contextmanager
def sample_corpus(
    sample: Sample, tokenizer: PreTrainedTokenizerFast, heldout_fraction: float = 0.05
) -> Iterator[Corpus]:
    """Yield a corpus of a sample, in a temporary directory."""
    with TemporaryDirectory() as name:
        directory = Path(name, "corpus")
        directory.mkdir()
        with CorpusWriter(directory, tokenizer, heldout_fraction=heldout_fraction) as writer:
            for _ in writer.write(sample.documents):
                pass
            writer.finish({})
        yield Corpus.open(directory)


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
) -> Cost:
    """Estimate the cost of :func:`build_corpus` with the same arguments; ``out`` is not written.

    The figures are ``documents``, ``tokens``, ``sampled_documents``, ``tokens_per_second`` and
    ``bytes_per_token``.
    """
    target = check_path("the corpus to write", out)
    _check_build(target, tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    sample = draw_sample(open_reader(inputs, columns, skip_bad_rows, loaded))
    return estimate_from(sample, loaded, vocab_size)


def estimate_from(
    sample: Sample, tokenizer: PreTrainedTokenizerFast | None, vocab_size: int = 8192
) -> Cost:
    """Extrapolate the cost of a corpus from a sample of its input.

    Without a tokenizer one of ``vocab_size`` is trained.
    """
    scale, reads, training = sample.scale, 1 if tokenizer else 2, 0.0
    began = time.perf_counter()
    if tokenizer is None:
        texts = [document.text for document in sample.documents]
        tokenizer = train_tokenizer(iter(texts), vocab_size)
        max_scale = TRAINING_CHARACTERS / max(1, sum(map(len, texts)))
        training = (time.perf_counter() - began) * max(1.0, min(scale or max_scale, max_scale))
        began = time.perf_counter()
    with sample_corpus(sample, tokenizer, 0.0) as corpus:
        seconds = time.perf_counter() - began
        tokens = corpus.num_tokens
        disk = sum(path.stat().st_size for path in corpus.path.glob("*-0*"))
    figures = {
        "documents": sample.num_documents,
        "tokens": None,
        "sampled_documents": len(sample.documents),
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "bytes_per_token": disk / tokens,
    }
    total = None
    if scale is not None and sample.seconds is not None:
        total = training + reads * sample.seconds + scale * seconds
        figures["tokens"] = round(scale * tokens)
    return Cost(
        total,
        peak_memory(),
        None if scale is None else round(scale * disk),
        figures,
        basis=f"Measured on {len(sample.documents):,} of the documents.",
        unknown=sample.unknown,
    )
