"""Building a corpus directory in parts, by any number of workers.

A part reads its share of the input and writes a shard; the last step puts the shards of all parts
together. Documents are in the order of the input, whatever the numbers of parts and workers.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.corpus import layout
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.filters import NEAR_DUPLICATE, Filters, NearDuplicates
from prismlm.corpus.read import (
    DatasetReader,
    DocumentReader,
    HubDataset,
    Paths,
    PipelineReader,
    repeated_id,
)
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import MIN_VOCABULARY, fingerprint, load_tokenizer, train_tokenizer
from prismlm.corpus.writer import PART_FILE, merge_parts, write_part
from prismlm.cost import Cost, peak_memory
from prismlm.errors import (
    BadRow,
    InputError,
    Interrupted,
    check_kind,
    check_number,
    check_path,
    check_whole,
)
from prismlm.files import atomic_directory, discard, read_json, room_to_write, write_json
from prismlm.outputs import check_outputs
from prismlm.parts import Engine, Parts, Work, check_workers, run_parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MINHASH, PARTS = "minhash", "part-*"
# A file of a part: sorted hashes of the ids that it has read, also of documents left out.
IDS_FILE = "ids.npy"
# Hashes of ids that are compared at once, of about 50 bytes each.
IDS_AT_ONCE = 2**25
# A tokenizer is trained on the beginnings of at most so many equal parts of the input, of so many
# bytes or one file of a dataset at least.
TRAINING_CHARACTERS, PLACES, PLACE_BYTES = 64_000_000, 16, 2**22
# An estimate reads for so long, and makes a corpus of so much at most, but for a single document.
READING_SECONDS, SAMPLE_CHARACTERS = 5.0, 1_000_000


@dataclass(frozen=True)
class CorpusPart:
    """One part of a corpus, as a step of datatrove; finished parts are kept beside ``out``.

    Attributes:
        out: the corpus directory to write.
        tokenizer: a directory or a Hugging Face name; None trains one, once for all parts.
        inputs: as :func:`build_corpus` takes them; None: documents of the steps before, whose
            metadata has the columns.
        run, not_read: what :meth:`list_inputs` records: the settings that all parts share, and
            the number of files that are not read, by extension.
        used: hashes of ids that earlier parts have, by part.

    The others are arguments of :func:`build_corpus`.
    """

    out: Path
    tokenizer: str | os.PathLike[str] | None = None
    inputs: Any = None
    vocab_size: int = 8192
    columns: Columns = field(default_factory=Columns)
    heldout_fraction: float = 0.05
    filters: Filters = field(default_factory=Filters)
    skip_bad_rows: bool = False
    overwrite: bool = False
    run: dict[str, Any] = field(default_factory=dict)
    not_read: dict[str, int] = field(default_factory=dict)
    used: Mapping[int, list[int]] = field(default_factory=dict)
    progress: Reporter = SILENT

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write a part, unless it is finished; the last one writes the corpus."""
        if self.inputs is None and data is None:
            raise InputError("there is nothing to read: name inputs, or put a reader before it.")
        if self.inputs is None and self.tokenizer is None:
            raise InputError("documents of the steps before are read once: name a tokenizer.")
        if self.filters.near_duplicates:
            raise InputError(
                "a part by itself cannot find near-duplicates in others: make all parts with "
                "--workers, or put datatrove's MinHash before it (docs/corpus.md)."
            )
        part = self.list_inputs(world_size)
        part.train()
        part.make(data, rank, world_size)
        if len(Parts(self.out, world_size).complete()) == world_size:
            with writing(self.out, wait=True):
                part.finish(world_size)

    @property
    def partial(self) -> Path:
        """The directory of parts, and of the steps before them."""
        return Parts(self.out, 1).path

    @property
    def trained(self) -> Path:
        """Where a trained tokenizer is saved."""
        return self.partial / layout.TOKENIZER_DIRECTORY

    @property
    def near_duplicates(self) -> NearDuplicates:
        """The search for near-duplicates."""
        return NearDuplicates(self.partial / MINHASH)

    @property
    def is_trained(self) -> bool:
        """Whether there is a tokenizer."""
        return self.tokenizer is not None or self.trained.is_dir()

    @cached_property
    def loaded(self) -> PreTrainedTokenizerFast:
        """The tokenizer."""
        return load_tokenizer(self.tokenizer or self.trained)

    def open_inputs(self, **how: Any) -> DocumentReader:
        """Return a reader of the inputs, which leaves out chats without an answer."""
        kind: Any = DatasetReader if isinstance(self.inputs, HubDataset) else DocumentReader
        how |= {"skip_bad_rows": self.skip_bad_rows, "answered_chats": True}
        return kind(self.inputs, self.columns, **how)

    def list_inputs(self, count: int, reader: DocumentReader | None = None) -> CorpusPart:
        """Return this part with its files listed, and what all parts share.

        InputError for finished parts of another input, or if the corpus would replace its input.
        """
        self.check()
        inputs, tokenizer, ignored = self.inputs, self.tokenizer, dict[str, int]()
        # Workers may have another current directory.
        if tokenizer is not None and os.path.exists(tokenizer):
            tokenizer = Path(tokenizer).absolute()
        paths = list[Path]()
        if isinstance(inputs, HubDataset):
            inputs = inputs.absolute()
            paths = [*map(Path, (inputs.name, *inputs.data_files))]
        elif inputs is not None:
            reader = reader or self.open_inputs()
            inputs = [file.as_listed() for file in reader.files]
            paths = [file.path for file in inputs if isinstance(file.path, Path)]
            ignored = dict(sorted(reader.ignored.items()))
        for path in paths if self.out.exists() else ():
            here, there = os.path.realpath(path), os.path.realpath(self.out)
            if path.exists() and Path(here).is_relative_to(there):
                raise InputError(
                    f"{path} lies in {self.out}, which the corpus would replace. Choose another "
                    "directory."
                )
        changed: dict[str, Any] = {"tokenizer": tokenizer, "inputs": inputs, "not_read": ignored}
        part = replace(self, out=self.out.absolute(), **changed)
        run = part._run(count)
        Parts(self.out, count).check(run, overwrite=self.overwrite, names=PARTS)
        for path in (self.trained, self.near_duplicates.directory):
            note = path / RUN_FILE
            if path.is_dir() and (not note.is_file() or read_json(note) != run):
                discard(path)
        return replace(part, run=run)

    def _run(self, count: int) -> dict[str, Any]:
        """Return what all parts share."""
        trained = {"vocab_size": self.vocab_size}
        run = {
            "heldout_fraction": self.heldout_fraction,
            "skip_bad_rows": self.skip_bad_rows,
            "tokenizer": trained if self.tokenizer is None else fingerprint(self.loaded),
            "parts": count,
            "filters": asdict(self.filters) | {"languages": list(self.filters.languages)},
            "prismlm": prismlm.__version__,
            "columns": asdict(self.columns),
        }
        if isinstance(self.inputs, HubDataset):
            return run | self.inputs.described()
        files = [[str(file.path), file.name, file.state] for file in self.inputs or ()]
        size = sum(state[0] for _, _, state in files)
        # Names and versions of many files would be long.
        listing = f"{len(files):,} files, {size:,} bytes, listing {fingerprints.of_json(files)}"
        return run | {"files": listing}

    def check(self) -> None:
        """Raise InputError for arguments that a build would refuse, before anything is read."""
        if self.tokenizer is None:
            check_whole("the vocabulary size", self.vocab_size, MIN_VOCABULARY)
        else:
            kinds = (str, os.PathLike)
            check_kind("the tokenizer", self.tokenizer, kinds, "a directory or a name")
        expected, fraction = "at least 0 and below 1", self.heldout_fraction
        check_number("the held-out fraction", fraction, expected, lambda share: 0 <= share < 1)
        self.filters.check()
        check_outputs(directory=self.out, overwrite=True)
        if self.out.exists() and not layout.is_corpus(self.out):
            raise InputError(
                f"{self.out} exists and is not a corpus, so it is not replaced. Choose another "
                "directory."
            )
        if self.out.exists() and not self.overwrite:
            raise InputError(
                f"{self.out} exists. Choose another directory, or replace it with --overwrite "
                "(in Python: overwrite=True)."
            )

    def documents(self, reader: DocumentReader, rank: int) -> Iterator[Document]:
        """Yield the documents of a part that the filters keep."""
        removed = self.near_duplicates.of_part(rank) if self.filters.near_duplicates else ()
        for document in reader:
            is_near = reader.number in removed
            reason = NEAR_DUPLICATE if is_near else self.filters.reason(document)
            if reason is None:
                yield document
            else:
                reader.leave_out(reason)

    def sign(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the signatures of a part, for the search for near-duplicates."""
        tokenizer = self.loaded if self.is_trained else None
        reader = self.open_inputs(tokenizer=tokenizer, share=(rank, world_size), used=None)
        self.near_duplicates.sign(reader, rank)

    def train(self) -> None:
        """Train a tokenizer on texts from all over the input, unless one is named or trained."""
        if self.is_trained:
            return
        task = self.progress.task("Training the tokenizer", None, "tokens")
        # The first part trains it, while others wait.
        with writing(self.trained, wait=True), task:
            if self.trained.is_dir():
                return
            trained = train_tokenizer(iter(self.training_texts()), self.vocab_size)
            with atomic_directory(self.trained) as directory:
                trained.save_pretrained(directory)
                write_json(directory / RUN_FILE, self.run)

    def training_texts(self) -> list[str]:
        """Return texts of as many characters as a tokenizer is trained on, or all."""
        whole = self.open_inputs()
        count = max(whole.default_parts(), (whole.total or 0) // PLACE_BYTES)
        count = min(PLACES, count)
        texts, size = list[str](), 0
        # One after another, as a reader may hold a whole file.
        for number in range(count):
            until = TRAINING_CHARACTERS * (number + 1) // count
            for document in self.open_inputs(share=(number, count), used=None):
                if self.filters.reason(document) is None:
                    texts.append(document.text[: until - size])
                    size += len(texts[-1])
                if size >= until:
                    break
        return texts

    def make(self, data: Any, rank: int, count: int) -> None:
        """Write a part, unless it is finished."""
        directory, share = Parts(self.out, count).part(rank), (rank, count)
        with writing(directory), self._room():
            if directory.is_dir():
                return
            if self.inputs is None:
                skip = self.skip_bad_rows
                reader = PipelineReader(data, self.columns, skip_bad_rows=skip, share=share)
            else:
                used = self.used.get(rank, ())
                reader = self.open_inputs(tokenizer=self.loaded, share=share, used=used)
            total = None if reader.total is None else reader.total // count
            name = "Tokenising" if count == 1 else f"Tokenising, part {rank + 1} of {count}"
            counts = {"left_out": reader.left_out, "read": reader.documents}
            with (
                atomic_directory(directory) as new,
                self.progress.task(name, total, reader.unit) as task,
            ):
                done, documents = 0, self.documents(reader, rank)
                for _ in write_part(new, self.loaded, documents, self.heldout_fraction, **counts):
                    task.advance(reader.done - done)
                    done = reader.done
                np.save(new / IDS_FILE, reader.ids())
                write_json(new / RUN_FILE, self.run)

    def _room(self) -> AbstractContextManager[None]:
        kept, what = Parts(self.out, 1).kept, f"the corpus {self.out}"
        return room_to_write(what, self.out.parent, lambda: f"Make room. {kept()}")

    def build(self, count: int, engine: Engine, workers: int) -> None:
        """Make all parts with workers, and write the corpus."""
        alone = workers == 1 and engine == "local"
        # Either a part shows its progress, or how many parts are made is shown.
        part = self if alone else replace(self, progress=SILENT)
        reporter, near = SILENT if alone else self.progress, self.near_duplicates
        run = partial(run_parts, engine=engine, workers=workers, progress=reporter)
        try:
            if self.filters.near_duplicates and not near.directory.is_dir():
                run(part.sign, count)
                buckets = near.buckets()
                run(near.compare, buckets, workers=min(workers, buckets))
                near.cluster()
                write_json(near.directory / RUN_FILE, self.run)
            self.train()
            run(part.make, count)
            part.finish(count, run)
        except KeyboardInterrupt as error:
            raise Interrupted(Parts(self.out, count).kept()) from error
        except InputError:
            # Another input, or settings, cannot use the steps before the parts.
            if self.partial.is_dir() and not any(self.partial.glob(PARTS)):
                discard(self.partial)
            raise

    def finish(self, count: int, run: Callable[[Work, int], None] = run_parts) -> None:
        """Write the corpus of all parts, unless another process has just done so.

        Parts with an id of an earlier part are made again, by ``run``: as with an id that a part
        has twice, the later document is left out as a bad row, or an InputError. An id is judged
        before the filters: the first document in the order of the input keeps it.
        """
        parts = Parts(self.out, count)
        if not parts.path.is_dir():
            return
        parts.check(self.run, names=PARTS)
        repeated = _repeated_ids([parts.part(number) / IDS_FILE for number in range(count)])
        if repeated and self.inputs is None:
            number = min(repeated)
            raise InputError(f"{_repeated(parts, number, {*repeated[number]})} Fix the row.")
        for number in repeated:
            discard(parts.part(number))
        if repeated:
            # Unless bad rows are left out, the first such id is an error of the reader.
            run(replace(self, used=repeated).make, count)
        with self._room():
            self._merge(parts)
        discard(parts.path)

    def _merge(self, parts: Parts) -> None:
        directories, read = [parts.part(number) for number in range(parts.count)], {}
        if isinstance(self.inputs, HubDataset):
            read = {"read": self.inputs.described()}
        elif self.inputs is not None:
            documents = Counter[str]()
            for part in directories:
                documents.update(read_json(part / PART_FILE)["read"])
            files = [
                {"name": file.name, "bytes": file.size, "documents": documents[str(file.path)]}
                for file in self.inputs
            ]
            read = {"read": {"files": files, "not_read": self.not_read}}
        with atomic_directory(self.out) as new:
            merge_parts(directories, new, self.loaded, self.heldout_fraction, **read)


def build_corpus(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    vocab_size: int = 8192,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    filters: Filters | None = None,
    overwrite: bool = False,
    skip_bad_rows: bool = False,
    parts: int | None = None,
    workers: int = 1,
    engine: Engine = "local",
    progress: Reporter = SILENT,
) -> Corpus:
    """Read the inputs and write a corpus directory at ``out``, complete or not at all.

    Tokens, documents and fingerprint are the same for any numbers of parts and workers. Finished
    parts of an interrupted build are not made again.

    Args:
        inputs: files and directories, as :class:`DocumentReader` takes them; or a dataset.
        out: the directory to write.
        tokenizer, vocab_size: a directory or Hugging Face name. None trains a byte-level BPE
            tokenizer on up to 64 million characters from all over the input.
        columns: which columns hold the text and its metadata.
        heldout_fraction: of documents without a ``split``, in [0, 1).
        filters: which documents to leave out; ``corpus.json`` counts them by reason.
        overwrite: replace ``out`` if it is a corpus, and unfinished parts of another input.
        skip_bad_rows: leave out rows that cannot be used; ``corpus.json`` counts them by reason.
        parts: into how many parts to divide the input (default: one for each 256 MiB of files or
            file of a streamed dataset, and at least one for each worker).
        workers, engine: what makes the parts, as :func:`prismlm.parts.run_parts` does.
        progress: where to show the progress.
    """
    target, columns = check_path("the corpus to write", out), columns or Columns()
    settings: dict[str, Any] = {"vocab_size": vocab_size, "heldout_fraction": heldout_fraction}
    settings |= {"columns": columns, "skip_bad_rows": skip_bad_rows, "overwrite": overwrite}
    settings |= {"filters": filters or Filters(), "progress": progress}
    part = CorpusPart(target, tokenizer, inputs, **settings)
    with writing(target):
        part.check()
        reader = part.open_inputs()
        check_whole("the number of workers", workers, 1)
        count = max(workers, reader.default_parts()) if parts is None else parts
        count = check_whole("the number of parts", count, 1)
        check_workers(count, engine, workers)
        part.list_inputs(count, reader).build(count, engine, workers)
    return Corpus.open(target)


def _repeated(parts: Parts, number: int, keys: set[int]) -> BadRow:
    """Return the error for a part of documents that cannot be read again, by hashes of ids."""
    tables = (parts.part(n) / layout.DOCUMENTS.format(0) for n in range(number, -1, -1))
    ids = (i for path in tables for i in pq.read_table(path)["doc_id"].to_pylist())
    names = (f"the id {doc_id!r}" for doc_id in ids if layout.id_hash(doc_id) in keys)
    # Filters may have left out all documents that have it.
    name = next(names, "the id of a document that was left out")
    return repeated_id(f"part {number + 1} of {parts.count}", name)


def _repeated_ids(paths: Sequence[Path]) -> dict[int, list[int]]:
    """Return, by part, the hashes of ids that an earlier part has too.

    They are compared range by range of hashes; one file is open at once.
    """
    ranges = 1 + sum(len(np.load(path, mmap_mode="r")) for path in paths) // IDS_AT_ONCE
    bounds = [np.uint64(2**64 * n // ranges - (n > 0)) for n in range(ranges + 1)]
    repeated = dict[int, list[int]]()
    for low, high in pairwise(bounds):
        ids = list[np.ndarray]()
        for path in paths:
            every = np.load(path, mmap_mode="r")
            ends = np.searchsorted(every, low), np.searchsorted(every, high, side="right")
            ids.append(every[slice(*ends)].copy())
        keys, owners = np.concatenate(ids), np.repeat(np.arange(len(ids)), list(map(len, ids)))
        order = np.argsort(keys, kind="stable")
        again = order[1:][keys[order[1:]] == keys[order[:-1]]]
        for number, key in zip(owners[again].tolist(), keys[again].tolist(), strict=True):
            repeated.setdefault(number, []).append(key)
    return repeated


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Cost:
    """Estimate the cost of :func:`build_corpus` with the same settings; ``out`` is not written.

    Some seconds are read, small inputs completely, and a sample of that is made a corpus. The
    figures are ``documents`` and ``tokens`` (None if unknown), ``sampled_documents``,
    ``tokens_per_second`` and ``bytes_per_token``.
    """
    settings["filters"] = settings.get("filters") or Filters()
    part = CorpusPart(check_path("the corpus to write", out), tokenizer, inputs, **settings)
    part.check()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    reader = part.open_inputs(tokenizer=loaded)
    began = time.perf_counter()
    documents, seen, characters, share = _sample(reader)
    seconds, kept = time.perf_counter() - began, sum(len(one.text) for one in documents)
    scale = characters / share / kept if share else None
    began, training = time.perf_counter(), 0.0
    if loaded is None:
        loaded = train_tokenizer((document.text for document in documents), part.vocab_size)
        training = (time.perf_counter() - began) * min(scale or 1.0, TRAINING_CHARACTERS / kept)
    with TemporaryDirectory() as name:
        began = time.perf_counter()
        for _ in write_part(Path(name), loaded, documents):
            pass
        tokenising = time.perf_counter() - began
        tokens = read_json(Path(name) / PART_FILE)["counts"]["tokens"]
        disk = sum(path.stat().st_size for path in Path(name).glob("*-0*"))
    figures = {
        "documents": round(seen / share) if share else None,
        "tokens": round(scale * tokens) if scale else None,
        "sampled_documents": len(documents),
        "tokens_per_second": tokens / tokenising,
        "bytes_per_token": disk / tokens,
    }
    unknown = list[str]()
    if scale is None:
        unknown.append(f"Whether the rest is like the first {seen:,} documents.")
        unknown.append("How much the dataset holds: it does not say before it is read.")
    if part.filters != Filters():
        unknown.append("How much the filters leave out, and their time.")
    return Cost(
        training + seconds / share + scale * tokenising if scale else None,
        peak_memory(),
        round(scale * disk) if scale else None,
        figures,
        basis=f"Measured on {len(documents):,} of the documents.",
        unknown=tuple(unknown),
    )


def _sample(reader: DocumentReader) -> tuple[list[Document], int, int, float]:
    """Read for some seconds.

    Returned are every n-th document, the number of all and of their characters, and the share of
    the input that they are, 0 if it is unknown.
    """
    began, documents, every, kept, seen, characters = time.perf_counter(), [], 1, 0, 0, 0
    for document in reader:
        if seen % every == 0:
            documents.append(document)
            kept += len(document.text)
        seen += 1
        characters += len(document.text)
        if kept > SAMPLE_CHARACTERS and len(documents) > 1:
            documents, every = documents[::2], 2 * every
            kept = sum(len(one.text) for one in documents)
        if time.perf_counter() - began > READING_SECONDS:
            return documents, seen, characters, reader.done / reader.total if reader.total else 0.0
    return documents, seen, characters, 1.0
