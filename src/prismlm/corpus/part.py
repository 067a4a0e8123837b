"""Building a corpus directory in parts, by any number of workers.

A part reads its share of the input and writes a shard; the last step puts the shards of all parts
together. Documents are in the order of the input, whatever the numbers of parts and workers.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

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
from prismlm.corpus.writer import merge_parts, write_part
from prismlm.cost import Cost, peak_memory
from prismlm.errors import InputError, Interrupted, check_number, check_path, check_whole
from prismlm.files import atomic_directory, discard, room_to_write, write_json
from prismlm.outputs import check_outputs
from prismlm.parts import Engine, Parts, Work, check_workers, run_parts
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import RUN_FILE, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MINHASH, PARTS = "minhash", "part-*"
# A tokenizer is trained on the beginnings of at most so many equal parts of the input, of so many
# bytes or one file of a dataset at least.
TRAINING_CHARACTERS, PLACES, PLACE_BYTES = 64_000_000, 16, 2**22
# An estimate tokenises for so long, after training a tokenizer on so many characters.
MEASURED_SECONDS, MEASURED_CHARACTERS = 5.0, 1_000_000


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
        used: ids that earlier parts have, by part.

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
    used: Mapping[int, Collection[str]] = field(default_factory=dict)
    progress: Reporter = SILENT

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write a part, unless it is finished; the last one writes the corpus."""
        if self.inputs is None and (data is None or self.tokenizer is None):
            raise InputError(
                "nothing to read, or no tokenizer: name inputs; or put a reader before this step "
                "and name a tokenizer, as its documents are read once."
            )
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
    def near_duplicates(self) -> NearDuplicates:
        """The search for near-duplicates."""
        return NearDuplicates(self.partial / MINHASH)

    @cached_property
    def loaded(self) -> PreTrainedTokenizerFast:
        """The tokenizer."""
        return load_tokenizer(self.tokenizer or self.partial / layout.TOKENIZER_DIRECTORY)

    def open_inputs(self, **how: Any) -> DocumentReader:
        """Return a reader of the inputs, which leaves out chats without an answer."""
        kind: Any = DatasetReader if isinstance(self.inputs, HubDataset) else DocumentReader
        how |= {"skip_bad_rows": self.skip_bad_rows, "answered_chats": True}
        return kind(self.inputs, self.columns, **how)

    def list_inputs(self, count: int, reader: DocumentReader | None = None) -> CorpusPart:
        """Return this part with its files listed, and what all parts share.

        InputError for finished parts of another input.
        """
        self.check()
        inputs, tokenizer, ignored = self.inputs, self.tokenizer, dict[str, int]()
        # Workers may have another current directory.
        if tokenizer is not None and os.path.exists(tokenizer):
            tokenizer = Path(tokenizer).absolute()
        if isinstance(inputs, HubDataset):
            inputs = inputs.absolute()
        elif inputs is not None:
            reader = reader or self.open_inputs()
            inputs = [file.absolute() for file in reader.files]
            ignored = dict(sorted(reader.ignored.items()))
            for path in (file.path for file in reader.files if isinstance(file.path, Path)):
                if self.out.exists() and path.resolve().is_relative_to(self.out.resolve()):
                    raise InputError(f"{path} lies in {self.out}, which the corpus would replace.")
        changed: dict[str, Any] = {"tokenizer": tokenizer, "inputs": inputs, "not_read": ignored}
        part = replace(self, out=self.out.absolute(), **changed)
        run = part._run(count)
        Parts(self.out, count).check(run, overwrite=self.overwrite)
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
        expected, fraction = "at least 0 and below 1", self.heldout_fraction
        check_number("the held-out fraction", fraction, expected, lambda share: 0 <= share < 1)
        self.filters.check()
        check_outputs(directory=self.out, overwrite=True)
        if self.out.exists() and not (self.overwrite and layout.is_corpus(self.out)):
            raise InputError(
                f"{self.out} exists: choose another directory, or replace it, if it is a corpus, "
                "with --overwrite (in Python: overwrite=True)."
            )

    def sign(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the signatures of a part, for the search for near-duplicates."""
        # A tokenizer is trained later; chats need one that is named.
        tokenizer = None if self.tokenizer is None else self.loaded
        reader = self.open_inputs(tokenizer=tokenizer, share=(rank, world_size), used=None)
        self.near_duplicates.sign(reader, rank)

    def train(self) -> None:
        """Train a tokenizer on texts from all over the input, unless one is named or trained."""
        target = self.partial / layout.TOKENIZER_DIRECTORY
        if self.tokenizer is not None or target.is_dir():
            return
        task = self.progress.task("Training the tokenizer", None, "tokens")
        # The first part trains it, while others wait.
        with writing(target, wait=True), task:
            if target.is_dir():
                return
            trained = train_tokenizer(iter(self.training_texts()), self.vocab_size)
            with atomic_directory(target) as directory:
                trained.save_pretrained(directory)
                write_json(directory / RUN_FILE, self.run)

    def training_texts(self) -> list[str]:
        """Return texts of as many characters as a tokenizer is trained on, or all."""
        whole = self.open_inputs()
        count = min(PLACES, max(whole.default_parts(), (whole.total or 0) // PLACE_BYTES))
        texts, size = list[str](), 0
        how: dict[str, Any] = {"reason": lambda document, _: self.filters.reason(document)}
        # One after another, as a reader may hold a whole file.
        for number in range(count):
            until = TRAINING_CHARACTERS * (number + 1) // count
            for document in self.open_inputs(share=(number, count), used=None, **how):
                texts.append(document.text[: until - size])
                size += len(texts[-1])
                if size >= until:
                    break
        return texts

    def _reader(self, data: Any, rank: int, count: int) -> DocumentReader:
        """Return a reader of the documents of a part that the filters keep."""
        near = self.near_duplicates.of_part(rank) if self.filters.near_duplicates else ()

        def reason(document: Document, number: int) -> str | None:
            return NEAR_DUPLICATE if number in near else self.filters.reason(document)

        how: dict[str, Any] = {"share": (rank, count), "reason": reason}
        if self.inputs is None:
            return PipelineReader(data, self.columns, skip_bad_rows=self.skip_bad_rows, **how)
        return self.open_inputs(tokenizer=self.loaded, used=self.used.get(rank, ()), **how)

    def make(self, data: Any, rank: int, count: int) -> None:
        """Write a part, unless it is finished."""
        directory = Parts(self.out, count).part(rank)
        with writing(directory), self._room():
            if directory.is_dir():
                return
            reader = self._reader(data, rank, count)
            total = None if reader.total is None else reader.total // count
            name = "Tokenising" if count == 1 else f"Tokenising, part {rank + 1} of {count}"
            with (
                atomic_directory(directory) as new,
                self.progress.task(name, total, reader.unit) as task,
            ):
                done = 0
                for _ in write_part(new, self.loaded, reader, reader.left_out):
                    task.advance(reader.done - done)
                    done = reader.done
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
        found = near.directory / RUN_FILE
        try:
            if self.filters.near_duplicates and not found.is_file():
                shutil.rmtree(near.directory, ignore_errors=True)
                run(part.sign, count)
                buckets = near.buckets()
                run(near.compare, buckets, workers=min(workers, buckets))
                near.cluster()
                write_json(found, self.run)
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
        has twice, the later document is left out as a bad row, or an InputError.
        """
        parts = Parts(self.out, count)
        if not parts.path.is_dir():
            return
        directories = [parts.part(number) for number in range(count)]
        if repeated := _repeated_ids(directories):
            if self.inputs is None:
                number, ids = next(iter(repeated.items()))
                raise repeated_id(f"part {number + 1} of {count}", min(ids))
            for number in repeated:
                discard(parts.part(number))
            # Unless bad rows are left out, the first such id is an error of the reader.
            run(replace(self, used=repeated).make, count)
        read: dict[str, Any] = {}
        if isinstance(self.inputs, HubDataset):
            read = {"read": self.inputs.described()}
        elif self.inputs is not None:
            files = [{"name": file.name, "bytes": file.size} for file in self.inputs]
            read = {"read": {"files": files, "not_read": self.not_read}}
        with self._room(), atomic_directory(self.out) as new:
            merge_parts(directories, new, self.loaded, self.heldout_fraction, **read)
        discard(parts.path)


def _repeated_ids(parts: Sequence[Path]) -> dict[int, set[str]]:
    """Return, by part, the ids that an earlier part has too."""
    seen, repeated = set[str](), dict[int, set[str]]()
    for number, part in enumerate(parts):
        table = pq.read_table(part / layout.DOCUMENTS.format(0), columns=["doc_id"])
        ids = table["doc_id"].to_pylist()
        if again := seen.intersection(ids):
            repeated[number] = again
        seen.update(ids)
    return repeated


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


def estimate_build(
    inputs: Paths | HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Cost:
    """Estimate the cost of :func:`build_corpus` with the same settings; ``out`` is not written.

    The beginning of the input is made a corpus, for some seconds; small inputs completely. The
    figures are ``documents`` and ``tokens`` (None if unknown) and ``tokens_per_second``.
    """
    settings["filters"] = settings.get("filters") or Filters()
    part = CorpusPart(check_path("the corpus to write", out), tokenizer, inputs, **settings)
    part.check()
    began, training = time.perf_counter(), 0.0
    if tokenizer is None:
        reader, texts, characters = part.open_inputs(), list[str](), 0
        for document in reader:
            texts.append(document.text)
            characters += len(document.text)
            if characters > MEASURED_CHARACTERS:
                break
        loaded = train_tokenizer(iter(texts), part.vocab_size)
        done = max(1, reader.done)
        times = min((reader.total or done) / done, TRAINING_CHARACTERS / characters)
        training = (time.perf_counter() - began) * times
    else:
        loaded = load_tokenizer(tokenizer)
    reader, share = part.open_inputs(tokenizer=loaded), 1.0
    with TemporaryDirectory() as name:
        began = time.perf_counter()
        with closing(write_part(Path(name), loaded, reader)) as groups:
            for _ in groups:
                if time.perf_counter() - began > MEASURED_SECONDS:
                    share = reader.done / reader.total if reader.total else 0.0
                    break
        seconds = time.perf_counter() - began
        lengths = pq.read_table(Path(name) / layout.DOCUMENTS.format(0))["length"].to_numpy()
        disk = sum(path.stat().st_size for path in Path(name).glob("*-0*"))
    documents, tokens = len(lengths), int(lengths.sum())
    unknown = list[str]()
    if share < 1:
        unknown.append(f"Whether the rest is like the first {documents:,} documents.")
    if not share:
        unknown.append("How much the dataset holds: it does not say before it is read.")
    if part.filters != Filters():
        unknown.append("How much the filters leave out, and their time.")
    return Cost(
        training + seconds / share if share else None,
        peak_memory(),
        round(disk / share) if share else None,
        {
            "documents": round(documents / share) if share else None,
            "tokens": round(tokens / share) if share else None,
            "tokens_per_second": tokens / seconds,
        },
        basis=f"Measured on the first {documents:,} documents.",
        unknown=tuple(unknown),
    )
