"""Building a corpus directory: read, train a tokenizer where none is given, tokenise, write.

Closed shards are kept in ``.NAME.partial`` beside the corpus until it is whole. The same command
reads its input again after an interruption, and tokenises what is not in them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import (
    check_vocab_size,
    fingerprint,
    load_tokenizer,
    train_tokenizer,
)
from prismlm.corpus.writer import CorpusWriter
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

# Of a corpus, its tokens and compressed text, for each byte of text; of compressed files, more.
OUTPUT_OF_INPUT = 0.9
TRAINING_CHARACTERS = 64_000_000
SHARD_TOKENS = 2**27
STATE_FILE, STATE_VERSION = "build.json", 4


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
    """Read the inputs and write a corpus directory at ``out``; the same inputs give the same one.

    Args:
        inputs: files and directories, as :func:`read_documents` takes them; or a dataset.
        out: the directory to write. It appears when it is complete, or not at all.
        tokenizer: a directory or Hugging Face name. None trains a byte-level BPE tokenizer on up
            to 64 million characters of the documents, chosen by the hash of their ids.
        vocab_size: the size of a vocabulary that is trained; unused where ``tokenizer`` is given.
        columns: which columns hold the text and what is known about it.
        heldout_fraction: the share of documents to hold out, in [0, 1), of those that do not say
            by a ``split`` of their own whether they are.
        shard_tokens: a shard ends before the document that would take it beyond this; it is also
            the most that an interruption loses.
        overwrite: replace ``out`` if it is a corpus, and what another build began there.
        skip_bad_rows: leave out rows that cannot be used; ``corpus.json`` counts them by reason.
        reuse: open ``out`` if it is the corpus of the same dataset and settings; that the dataset
            has changed since is not noticed.
        wait: until no other process writes ``out``, instead of refusing.
        progress: where to show the work; its unit is bytes of files, or rows of a dataset.

    Raises:
        InputError: an argument or an input cannot be used; see :class:`DocumentReader`.
    """
    target = check_path("the corpus to write", out)
    with writing(target, wait=wait):
        chosen = None
        if reuse and isinstance(inputs, HubDataset) and tokenizer is not None:
            chosen = load_tokenizer(tokenizer)
            there = existing_corpus(inputs, target, chosen, columns, heldout_fraction)
            if there is not None:
                return there
        check_build(target, tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
        reader = open_reader(inputs, columns, skip_bad_rows)
        _check_place(target, inputs, reader)
        if tokenizer is None:
            chosen = _train(reader, vocab_size, progress)
        reader.tokenizer = chosen = chosen or load_tokenizer(str(tokenizer))
        how = {"heldout_fraction": heldout_fraction, "shard_tokens": shard_tokens}
        writer = CorpusWriter(partial_of(target), chosen, **how)
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
    files = [[os.path.realpath(file.path), file.path.stat().st_size] for file in reader.files]
    return {"files": fingerprints.of_json([files, asdict(columns or Columns())])}


def open_reader(
    inputs: Paths | HubDataset,
    columns: Columns | None,
    skip_bad_rows: bool,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> DocumentReader:
    """Return what reads the inputs for a corpus, of which chats without an answer are no part."""
    kind: Any = DatasetReader if isinstance(inputs, HubDataset) else DocumentReader
    return kind(
        inputs, columns, tokenizer=tokenizer, skip_bad_rows=skip_bad_rows, answered_chats=True
    )


def check_build(
    out: Path,
    tokenizer: str | os.PathLike[str] | None,
    vocab_size: int,
    heldout_fraction: float,
    shard_tokens: int,
    overwrite: bool,
) -> None:
    """Raise InputError for arguments that a build would refuse, before anything is read."""
    if tokenizer is None:
        check_vocab_size(vocab_size)
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


def _check_place(out: Path, inputs: Paths | HubDataset, reader: DocumentReader) -> None:
    """Raise InputError for a corpus that would replace text it is built of, or have no room."""
    named = [inputs.name, *inputs.data_files] if isinstance(inputs, HubDataset) else []
    for path in [*map(Path, named), *(file.path for file in reader.files)]:
        if path.exists() and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(out)):
            raise InputError(
                f"{path} lies in {out}, which the corpus would replace. Choose another directory."
            )
    size = sum(file.path.stat().st_size for file in reader.files)
    check_room(f"the corpus {out}", out, size * OUTPUT_OF_INPUT, partial_of(out))


def partial_of(target: Path) -> Path:
    """Return where the parts of a corpus lie until it is whole."""
    return target.with_name(f".{target.name}.partial")


def _train(reader: DocumentReader, vocab_size: int, progress: Reporter) -> PreTrainedTokenizerFast:
    with progress.task("Sampling text", reader.total, reader.unit) as task:
        texts = training_texts(_reported(reader, task), TRAINING_CHARACTERS)
    with progress.task("Training the tokenizer", None, "tokens"):
        return train_tokenizer(iter(texts), vocab_size)


def _reported(reader: DocumentReader, task: Any) -> Iterator[Document]:
    done = 0
    for number, document in enumerate(reader):
        yield document
        if number % 256 == 0:
            task.advance(reader.done - done)
            done = reader.done
    task.advance(reader.done - done)


def training_texts(documents: Iterator[Document], limit: int) -> list[str]:
    """Choose whole texts of at most ``limit`` characters, by the hash of the documents' ids.

    Whenever the limit is passed, the half with the larger hashes is dropped: memory stays small,
    all parts of the input are sampled alike and the choice can be repeated.
    """
    threshold = 2**64
    kept: list[tuple[int, str]] = []
    size = 0
    for document in documents:
        key = int.from_bytes(hashlib.sha256(document.doc_id.encode()).digest()[8:16], "little")
        if key >= threshold:
            continue
        kept.append((key, document.text))
        size += len(document.text)
        while size > limit and len(kept) > 1:
            threshold //= 2
            kept = [item for item in kept if item[0] < threshold] or [min(kept)]
            size = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def _write(
    reader: DocumentReader,
    writer: CorpusWriter,
    origin: dict[str, Any],
    target: Path,
    progress: Reporter,
    *,
    overwrite: bool,
) -> None:
    """Write the corpus of what is read, from where an earlier run of the same ended."""
    partial = partial_of(target)
    begun = _begun(partial, origin, overwrite)
    with _keeping(partial), writer, progress.task("Tokenising", reader.total, reader.unit) as task:
        documents, done = iter(reader), 0
        if begun:
            writer.resume(begun["shards"], begun["digest"], documents)
            kept = sum(shard["documents"] for shard in begun["shards"])
            task.note(f"{kept:,} documents were kept")
        closed = len(writer.shards)
        for _ in writer.write(documents):
            if len(writer.shards) > closed:
                closed = len(writer.shards)
                note = {"version": STATE_VERSION, "origin": origin, "shards": writer.shards}
                write_json(partial / STATE_FILE, note | {"digest": writer.closed_digest})
            task.advance(reader.done - done)
            done = reader.done
        more = {"read": reader.manifest()} if reader.files else {"origin": origin}
        writer.finish(reader.left_out, **more)
    (partial / STATE_FILE).unlink(missing_ok=True)
    with atomic_directory(target) as empty:
        os.replace(partial, empty)


def _begun(partial: Path, origin: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Return what an earlier run of the same noted, empty if nothing, and remove the rest."""
    begun: dict[str, Any] = {}
    if (partial / STATE_FILE).is_file():
        try:
            begun = read_note(partial / STATE_FILE, partial, version=STATE_VERSION)
        except FormatError:
            if not overwrite:
                raise
        if begun and not overwrite:
            _check_same(f"{partial} holds what was begun", begun["origin"], origin)
        begun = begun if begun.get("origin") == origin else {}
    shards = begun.get("shards", ())
    kept = {STATE_FILE} if begun else set[str]()
    kept |= {name for shard in shards for name in shard["files"]}
    partial.mkdir(exist_ok=True)
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()
    return begun


def _check_same(what: str, before: dict[str, Any], origin: dict[str, Any]) -> None:
    way_out = "Resume that one, write to another directory, or remove it."
    check_same(f"{what} from another input", before, origin, way_out)


@contextmanager
def _keeping(partial: Path) -> Iterator[None]:
    """Remove what is of no use after a failure; say of Ctrl-C which shards are kept."""
    try:
        yield
    except BaseException as error:
        if not (partial / STATE_FILE).is_file():
            shutil.rmtree(partial, ignore_errors=True)
        elif isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"the shards that were closed are kept in {partial}. Run the same command again "
                "to resume."
            ) from error
        raise
