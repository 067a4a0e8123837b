"""Building a corpus directory from files: read, train a tokenizer where none is given, tokenise."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.chat import encode_chat, has_marks
from prismlm.corpus.datasets import DatasetReader, HubDataset
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.encode import Encoder, around_text, encoder_of
from prismlm.corpus.near_duplicates import LIKENESS, NearDuplicates
from prismlm.corpus.read import DocumentReader, Paths
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import (
    check_vocab_size,
    fingerprint,
    load_tokenizer,
    train_tokenizer,
)
from prismlm.corpus.writer import CorpusWriter
from prismlm.errors import InputError, check_kind, check_number, check_path, check_whole
from prismlm.files import WAY_OUT, atomic_directory, check_room, room_to_write, write_json
from prismlm.outputs import check_outputs
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import answering, writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

TRAINING_CHARACTERS = 64_000_000
# Of a corpus, its tokens and compressed text, for each byte of text; of compressed files, more.
OUTPUT_OF_INPUT = 0.9
_CHARACTERS_AT_ONCE = 1_000_000
_DOCUMENTS_AT_ONCE = 1024


def build_corpus(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = 2**27,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
    progress: Reporter = SILENT,
) -> Corpus:
    """Read the inputs and write a corpus directory at ``out``; the same inputs give the same bytes.

    Args:
        inputs: files and directories, as :func:`read_documents` takes them; or a dataset.
        out: the directory to write. It appears when it is complete, or not at all.
        tokenizer: a directory or Hugging Face name. None trains a byte-level BPE tokenizer on up
            to 64 million characters of the documents, chosen by the hash of their ids.
        vocab_size: the size of a vocabulary that is trained; unused where ``tokenizer`` is given.
        columns: which columns hold the text and what is known about it.
        heldout_fraction: the share of documents to hold out, in [0, 1), of those that do not say
            by a ``split`` of their own whether they are.
        shard_tokens: a shard ends before the document that would take it beyond this.
        overwrite: replace ``out`` if it is a corpus.
        skip_bad_rows: leave out rows that cannot be used; ``corpus.json`` counts them by reason.
        progress: where to show the work; its unit is bytes of input.

    Raises:
        InputError: an argument or an input cannot be used; see :class:`DocumentReader`.
    """
    target = check_path("the corpus to write", out)
    check_build(target, tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
    reader = _reader(inputs, target, columns, skip_bad_rows)
    what = f"the corpus {target}"
    check_room(what, target, reader.total_bytes * OUTPUT_OF_INPUT)
    enough = room_to_write(what, target.parent, WAY_OUT)
    with enough, writing(target), atomic_directory(target) as directory:
        # Another build may have ended between the first look and the lock.
        check_build(target, tokenizer, vocab_size, heldout_fraction, shard_tokens, overwrite)
        if tokenizer is None:
            chosen = _train(reader, vocab_size, progress)
        else:
            chosen = reader.tokenizer = load_tokenizer(tokenizer)
        settings = BuildSettings.of(chosen, heldout_fraction, shard_tokens)
        origin = origin_of(inputs, columns, settings) if isinstance(inputs, HubDataset) else None
        with settings.writer(directory) as writer:
            alike = NearDuplicates()
            with progress.task("Tokenising", reader.total, "bytes") as task:
                tokenise(_reported(reader, task), settings, writer, alike)
            made_of = {"read": reader.manifest()} if origin is None else {"origin": origin}
            more = made_of | {"near_duplicates": {"documents": alike.count, "likeness": LIKENESS}}
            settings.finish(directory, writer, reader.left_out, more)
    return Corpus.open(target)


@dataclass(frozen=True, slots=True, eq=False)
class BuildSettings:
    """How documents become a corpus.

    Attributes:
        tokenizer: for all of them.
        encoder: how it reads texts and chats.
        meta: what ``corpus.json`` says of the tokenizer.
        dtype: of a token.
        heldout_fraction: the share of documents to hold out.
        shard_tokens: the most tokens of a shard, if a document fits.
    """

    tokenizer: PreTrainedTokenizerFast
    encoder: Encoder
    meta: dict[str, Any]
    dtype: np.dtype[Any]
    heldout_fraction: float
    shard_tokens: int

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerFast, heldout_fraction: float, shard_tokens: int
    ) -> BuildSettings:
        """Return the settings for a tokenizer."""
        eos_token, eos_token_id = str(tokenizer.eos_token), cast(int, tokenizer.eos_token_id)
        vocabulary = max(len(tokenizer), eos_token_id + 1)
        meta = {
            "fingerprint": fingerprint(tokenizer),
            "vocab_size": vocabulary,
            "eos_token": eos_token,
            "eos_token_id": eos_token_id,
        }
        prefix, suffix = around_text(tokenizer)
        # A document ends with the end of text in any case.
        around = {
            "prefix": prefix,
            "suffix": suffix[: -1 if suffix[-1:] == [eos_token_id] else None],
        }
        meta |= {name: ids for name, ids in around.items() if ids}
        dtype = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)
        encoder = encoder_of(tokenizer)
        return cls(tokenizer, encoder, meta, dtype, heldout_fraction, shard_tokens)

    def writer(self, directory: Path) -> CorpusWriter:
        """Return what writes the shards into a directory."""
        return CorpusWriter(
            directory,
            dtype=self.dtype,
            eos_token_id=self.meta["eos_token_id"],
            shard_tokens=self.shard_tokens,
            heldout_fraction=self.heldout_fraction,
        )

    def finish(
        self,
        directory: Path,
        writer: CorpusWriter,
        left_out: Mapping[str, int],
        more: dict[str, Any],
    ) -> None:
        """Write all that a corpus has beside its shards.

        Args:
            directory: of the corpus.
            writer: of its shards.
            left_out: how many rows are not in it, by the reason.
            more: what else ``corpus.json`` says: the ``origin`` of a dataset, or the files read.
        """
        contents = writer.finish()
        contents["counts"]["skipped"] = sum(left_out.values())
        self.tokenizer.save_pretrained(directory / layout.TOKENIZER_DIRECTORY)
        meta = {
            "format": layout.FORMAT,
            "version": layout.FORMAT_VERSION,
            "dtype": self.dtype.name,
            "tokenizer": self.meta,
            "left_out": dict(sorted(left_out.items())),
            **contents,
            **more,
        }
        meta["digest"] = fingerprints.of_json(meta)
        write_json(directory / layout.META_FILE, meta)


def origin_of(
    dataset: HubDataset, columns: Columns | None, settings: BuildSettings
) -> dict[str, Any]:
    """Return all that a corpus of a dataset follows from, save what the dataset holds."""
    local = Path(dataset.name)
    files = [name if "://" in name else os.path.abspath(name) for name in dataset.data_files]
    named = asdict(columns or Columns())
    return {
        "dataset": str(local.resolve()) if local.exists() else dataset.name,
        "config": dataset.config,
        "split": dataset.split,
        "data_files": files,
        "columns": {role: name for role, name in named.items() if name is not None},
        "tokenizer": settings.meta["fingerprint"],
        "heldout_fraction": settings.heldout_fraction,
    }


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
    if not out.exists():
        return
    if not layout.is_corpus(out):
        raise InputError(
            f"{out} exists and is not a corpus, so it is not replaced. Choose another directory."
        )
    if not overwrite:
        raise InputError(
            f"{out} exists. Choose another directory, or replace it with --overwrite "
            "(in Python: overwrite=True)."
        )


def check_not_within(out: Path, read: Sequence[Path]) -> None:
    """Raise InputError for a corpus that would replace text that it is built of."""
    place = Path(os.path.realpath(out))
    for path in read:
        if path.exists() and Path(os.path.realpath(path)).is_relative_to(place):
            raise InputError(
                f"{path} lies in {out}, which the corpus would replace. Choose another directory."
            )


def _reader(
    inputs: Paths | HubDataset, target: Path, columns: Columns | None, skip_bad_rows: bool
) -> DatasetReader | DocumentReader:
    """Return what reads the inputs, none of which the corpus would replace."""
    reading: dict[str, Any] = {"skip_bad_rows": skip_bad_rows, "answered_chats": True}
    if isinstance(inputs, HubDataset):
        check_not_within(target, [Path(name) for name in (inputs.name, *inputs.data_files)])
        return DatasetReader(inputs, columns, **reading)
    reader = DocumentReader(inputs, columns, **reading)
    check_not_within(target, [file.path for file in reader.files])
    return reader


def _train(reader: DocumentReader, vocab_size: int, progress: Reporter) -> PreTrainedTokenizerFast:
    with progress.task("Sampling text", reader.total, "bytes") as task:
        texts = training_texts(_reported(reader, task), TRAINING_CHARACTERS)
    with progress.task("Training the tokenizer", None, "tokens"):
        return train_tokenizer(iter(texts), vocab_size)


def training_texts(documents: Iterator[Document], limit: int) -> list[str]:
    """Choose whole texts of at most ``limit`` characters, by the hash of the documents' ids.

    Whenever the limit is passed, the half with the larger hashes is dropped: memory stays small,
    every part of the input is drawn from alike and the choice can be repeated.
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


def tokenise(
    documents: Iterator[Document],
    settings: BuildSettings,
    writer: CorpusWriter,
    alike: NearDuplicates | None = None,
) -> None:
    """Write documents with their tokens, and note those that are alike."""
    for batch in document_batches(documents):
        tokens = encode_documents(settings, batch)
        for document, ids in zip(batch, tokens, strict=True):
            writer.add(document, ids)
        if alike is not None:
            alike.add(tokens)


def encode_documents(settings: BuildSettings, batch: list[Document]) -> list[list[int]]:
    """Return the token ids of each document, without the end of text that it gets in a corpus."""
    tokenizer, encoder = settings.tokenizer, settings.encoder
    found: list[list[int]] = [[]] * len(batch)
    texts, chats = list[int](), list[int]()
    for number, document in enumerate(batch):
        if document.messages is None:
            texts.append(number)
        elif has_marks(tokenizer, document.messages):
            found[number] = encode_chat(tokenizer, document.messages)
        else:
            chats.append(number)
    prefix, suffix = (settings.meta.get(name, []) for name in ("prefix", "suffix"))
    for number, ids in zip(texts, _encoded(encoder.text, batch, texts), strict=True):
        found[number] = [*prefix, *ids, *suffix]
    if chats:
        for number, ids in zip(chats, _encoded(encoder.chat, batch, chats), strict=True):
            found[number] = ids
    return found


def _encoded(encoder: Tokenizer, batch: list[Document], numbers: list[int]) -> list[list[int]]:
    texts = [batch[number].text for number in numbers]

    def encode() -> list[Any]:
        return encoder.encode_batch_fast(texts, add_special_tokens=False)

    # A batch of about a megabyte is encoded at once, a single document of a hundred is not.
    long = sum(map(len, texts)) > 2 * _CHARACTERS_AT_ONCE
    return [found.ids for found in (answering(encode) if long else encode())]


def document_batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches of about a megabyte of text."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _CHARACTERS_AT_ONCE or len(batch) == _DOCUMENTS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _reported(reader: DocumentReader, task: Task) -> Iterator[Document]:
    reported = 0
    for document in reader:
        yield document
        # After the yield: a document counts when the work on it is done.
        if reader.bytes_read - reported > 100_000:
            task.advance(reader.bytes_read - reported)
            reported = reader.bytes_read
    task.advance(reader.bytes_read - reported)
