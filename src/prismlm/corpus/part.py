"""Building a corpus directory in parts, by any number of workers.

A part reads its share of the input and writes shards; the last step moves the shards of all parts
together. Documents are in the order of the input, whatever the numbers of parts and workers.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

import prismlm
from prismlm import fingerprints
from prismlm.corpus import layout, sampling
from prismlm.corpus.datasets import DatasetReader, HubDataset, PipelineReader
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.filters import NEAR_DUPLICATE, Filters, NearDuplicates
from prismlm.corpus.read import DocumentReader, InputFile, is_remote, repeated_id
from prismlm.corpus.tokenizer import MIN_VOCABULARY, fingerprint, load_tokenizer, train_tokenizer
from prismlm.corpus.writer import PART_FILE, SHARD_TOKENS, PartWriter, merge_parts
from prismlm.errors import (
    InputError,
    check_kind,
    check_number,
    check_whole,
)
from prismlm.files import (
    atomic_directory,
    atomic_file,
    discard,
    read_json,
    replace_directory,
    room_to_write,
    write_json,
)
from prismlm.outputs import check_outputs
from prismlm.parts import Engine, Parts, run_parts
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import RUN_FILE, check_same, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Beside the parts: what was listed, and steps before the tokens, which may be discarded.
PLAN_FILE, STEPS, PARTS = ".plan.json", "steps", "part-*"
# Hashes of ids that are compared at once, 8 bytes each.
IDS_AT_ONCE = 2**25


@dataclass(frozen=True)
class CorpusPart:
    """One part of a corpus, as a step of datatrove; finished parts are kept beside ``out``.

    Attributes:
        out: the corpus directory to write.
        tokenizer: a directory or a Hugging Face name; None if :meth:`build` trains one.
        inputs: as :func:`build_corpus` takes them; None: documents of the steps before, whose
            metadata has the columns.
        merge: the last part to be finished writes the corpus.
        listed: what :meth:`list_inputs` recorded; None: a part lists the input itself.

    The others are arguments of :func:`build_corpus`.
    """

    out: Path
    tokenizer: str | os.PathLike[str] | None
    inputs: Any = None
    vocab_size: int = 8192
    columns: Columns = field(default_factory=Columns)
    heldout_fraction: float = 0.05
    shard_tokens: int = SHARD_TOKENS
    filters: Filters = field(default_factory=Filters)
    skip_bad_rows: bool = False
    overwrite: bool = False
    merge: bool = True
    listed: dict[str, Any] | None = None
    progress: Reporter = SILENT

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write a part, unless it is finished; the last one writes the corpus."""
        parts = Parts(self.out, world_size)
        if self.listed is None:
            self._check_alone(data)
            self.list_inputs(world_size)(data, rank, world_size)
            return
        directory = parts.part(rank)
        with writing(directory), self._room():
            if not directory.is_dir() and not (parts.path / layout.META_FILE).is_file():
                self._write(directory, rank, world_size, data)
        ready = len(parts.complete()) == world_size or (parts.path / layout.META_FILE).is_file()
        if self.merge and ready:
            with writing(self.out, wait=True):
                self.finish(world_size)

    def _check_alone(self, data: Any) -> None:
        """Raise InputError for what only all parts together could do."""
        if data is None and self.inputs is None:
            raise InputError("there is nothing to read: name inputs, or put a reader before it.")
        if self.tokenizer is None:
            raise InputError(
                "a part by itself cannot train a tokenizer on all of the text: name a --tokenizer "
                "(in Python: tokenizer=…), or make all parts with --workers."
            )
        if self.filters.near_duplicates:
            raise InputError(
                "a part by itself cannot find near-duplicates in others: make all parts with "
                "--workers, or put datatrove's MinHash before it (docs/corpus.md)."
            )

    def absolute(self) -> CorpusPart:
        """Return this part for workers that may have another current directory."""
        inputs, tokenizer = self.inputs, self.tokenizer
        if isinstance(inputs, HubDataset):
            inputs = inputs.absolute()
        if tokenizer is not None and os.path.exists(tokenizer):
            tokenizer = Path(tokenizer).absolute()
        return replace(self, out=self.out.absolute(), inputs=inputs, tokenizer=tokenizer)

    @property
    def partial(self) -> Path:
        """The directory of parts, which becomes the corpus."""
        return Parts(self.out, 1).path

    @property
    def trained(self) -> Path:
        """Where a trained tokenizer is saved."""
        return self.partial / layout.TOKENIZER_DIRECTORY

    def open_tokenizer(self) -> PreTrainedTokenizerFast | None:
        """Load the tokenizer; None if it is yet to be trained."""
        if self.tokenizer is None and not self.trained.is_dir():
            return None
        return load_tokenizer(self.tokenizer or self.trained)

    def open_inputs(self, inputs: Any, **how: Any) -> DocumentReader:
        """Return a reader of inputs."""
        return open_reader(inputs, self.columns, self.skip_bad_rows, **how)

    def list_inputs(self, count: int, reader: DocumentReader | None = None) -> CorpusPart:
        """Record what all parts share, and return this part with its files listed.

        InputError for finished parts of another input, or if the corpus would replace its input.
        """
        self.check()
        inputs, listed = self.inputs, dict[str, Any]()
        if reader is None and inputs is not None:
            reader = self.open_inputs(inputs)
        if reader is not None and not isinstance(inputs, HubDataset):
            inputs = [InputFile(_absolute(f.path), f.name, f.state) for f in reader.files]
            not_read = dict(sorted(reader.ignored.items()))
            listed = {"named_again": reader.duplicates, "not_read": not_read}
        part = replace(self, inputs=inputs)
        part._check_inputs()
        run, parts = part._run(count), Parts(self.out, count)
        parts.check(run, overwrite=self.overwrite, names=PARTS)
        path = parts.path / PLAN_FILE
        with writing(parts.path, wait=True):
            if not path.is_file() or read_json(path) != run:
                for name in (STEPS, layout.TOKENIZER_DIRECTORY):
                    shutil.rmtree(parts.path / name, ignore_errors=True)
                (parts.path / layout.META_FILE).unlink(missing_ok=True)
                parts.path.mkdir(exist_ok=True)
                write_json(path, run)
        return replace(part, listed=listed | {"run": run})

    def _check_inputs(self) -> None:
        """Raise InputError if the corpus would replace its own input."""
        if isinstance(self.inputs, HubDataset):
            paths = [*map(Path, (self.inputs.name, *self.inputs.data_files))]
        else:
            paths = [file.path for file in self.inputs or () if isinstance(file.path, Path)]
        for path in paths if self.out.exists() else ():
            real = Path(os.path.realpath(path))
            if path.exists() and real.is_relative_to(os.path.realpath(self.out)):
                raise InputError(
                    f"{path} lies in {self.out}, which the corpus would replace. Choose another "
                    "directory."
                )

    def _run(self, count: int) -> dict[str, Any]:
        """Return what all parts share."""
        tokenizer: Any = {"vocab_size": self.vocab_size}
        if self.tokenizer is not None:
            tokenizer = fingerprint(load_tokenizer(self.tokenizer))
        names = ("heldout_fraction", "shard_tokens", "skip_bad_rows")
        run = {name: getattr(self, name) for name in names} | {"tokenizer": tokenizer}
        run |= {"parts": count, "filters": asdict(self.filters), "prismlm": prismlm.__version__}
        run["filters"]["languages"] = list(self.filters.languages)
        if isinstance(self.inputs, HubDataset):
            return run | self.inputs.origin(self.columns)
        files = [[str(file.path), file.name, file.state] for file in self.inputs or ()]
        size = sum(state[0] for _, _, state in files)
        # Names and versions of many files would be long.
        listing = f"{len(files):,} files, {size:,} bytes, listing {fingerprints.of_json(files)}"
        return run | {"columns": asdict(self.columns), "files": listing}

    def check(self) -> None:
        """Raise InputError for arguments that a build would refuse, before anything is read."""
        if self.tokenizer is None:
            check_whole("the vocabulary size", self.vocab_size, MIN_VOCABULARY)
        else:
            kinds = (str, os.PathLike)
            check_kind("the tokenizer", self.tokenizer, kinds, "a directory or a name")
        expected, fraction = "at least 0 and below 1", self.heldout_fraction
        check_number("the held-out fraction", fraction, expected, lambda share: 0 <= share < 1)
        check_whole("the number of tokens in a shard", self.shard_tokens, 1)
        check_kind("overwrite", self.overwrite, bool, "True or False")
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

    def _check_plan(self) -> dict[str, Any]:
        """Return what all parts share; InputError if another command has replaced it since.

        It may do so as long as no part is finished.
        """
        run = (self.listed or {})["run"]
        what = f"{self.out} is being built by another command with other settings"
        way_out = "Let one of them finish, or choose another output for one."
        path = self.partial / PLAN_FILE
        if not path.is_file():
            raise InputError(
                f"{path} is missing: another command has finished {self.out} or removed its parts. "
                "Run the same command again."
            )
        check_same(what, read_json(path), run, way_out)
        return run

    def reader(
        self,
        rank: int,
        count: int,
        tokenizer: PreTrainedTokenizerFast | None = None,
        data: Any = None,
    ) -> DocumentReader:
        """Return the documents of a part, as they were listed; a tokenizer renders chats."""
        inputs = self.inputs
        if inputs is None:
            skip, share = self.skip_bad_rows, (rank, count)
            return PipelineReader(data, self.columns, skip_bad_rows=skip, share=share)
        self._check_plan()
        if not isinstance(inputs, HubDataset):
            # This process may have listed them long ago.
            for store in {file.path.fs for file in inputs if is_remote(file.path)}:
                store.invalidate_cache()
        used = np.load(self._used(rank)).tolist() if self._used(rank).exists() else ()
        return self.open_inputs(inputs, tokenizer=tokenizer, share=(rank, count), used=used)

    def documents(self, reader: DocumentReader, rank: int) -> Iterator[Document]:
        """Yield the documents of a part that the filters keep."""
        removed = self.near_duplicates.of_part(rank) if self.filters.near_duplicates else ()
        for number, document in enumerate(self.filtered(reader, rank)):
            if number in removed:
                reader.leave_out(NEAR_DUPLICATE)
            else:
                yield document

    def filtered(self, reader: DocumentReader, rank: int) -> Iterator[Document]:
        """Yield the documents of a part, with near-duplicates; then save hashes of all its ids."""
        for document in reader:
            if (reason := self.filters.reason(document)) is None:
                yield document
            else:
                reader.leave_out(reason)
        _save(self._ids(rank), reader.ids())

    def _ids(self, rank: int) -> Path:
        """Hashes of the ids of a part, of documents that the filters leave out as well."""
        return self.steps / f"ids-{rank:05d}.npy"

    def _used(self, rank: int) -> Path:
        """Those that an earlier part has; without any, there is no such file."""
        return self.steps / f"used-{rank:05d}.npy"

    @property
    def steps(self) -> Path:
        """Where steps before the tokens write."""
        return self.partial / STEPS

    @property
    def near_duplicates(self) -> NearDuplicates:
        """The search for near-duplicates."""
        return NearDuplicates(self.steps / "minhash")

    def sign(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the signatures of a part, for the search for near-duplicates."""
        reader = self.reader(rank, world_size, self.open_tokenizer())
        self.near_duplicates.sign(self.filtered(reader, rank), rank)

    def sample(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write a sample of a part, to train a tokenizer on."""
        path = self._sample(rank)
        with writing(path):
            if not path.is_file():
                reader = self.reader(rank, world_size)
                with self._task("Sampling text", reader, rank, world_size) as task:
                    documents = _reporting(self.documents(reader, rank), reader, task)
                    sampling.write_sample(documents, path)

    def _sample(self, rank: int) -> Path:
        return self.steps / f"sample-{rank:05d}.parquet"

    @contextmanager
    def _task(self, name: str, reader: DocumentReader, rank: int, count: int) -> Iterator[Task]:
        total = None if reader.total is None else reader.total // count
        name = name if count == 1 else f"{name}, part {rank + 1} of {count}"
        with self.progress.task(name, total, reader.unit) as task:
            yield task

    def _room(self) -> Any:
        kept = Parts(self.out, 1).kept
        what = f"the corpus {self.out}"
        return room_to_write(what, self.out.parent, lambda: f"Make room. {kept()}")

    def _write(self, directory: Path, rank: int, count: int, data: Any = None) -> None:
        tokenizer = self.open_tokenizer()
        assert tokenizer is not None
        reader = self.reader(rank, count, tokenizer, data)
        how: dict[str, Any] = {"heldout_fraction": self.heldout_fraction}
        how["shard_tokens"] = self.shard_tokens
        with (
            atomic_directory(directory) as new,
            PartWriter(new, tokenizer, **how) as writer,
            self._task("Tokenising", reader, rank, count) as task,
        ):
            done = 0
            for _ in writer.write(self.documents(reader, rank)):
                task.advance(reader.done - done)
                done = reader.done
            writer.finish(reader.left_out, reader.documents)
            write_json(new / RUN_FILE, (self.listed or {})["run"])

    def build(self, count: int, engine: Engine, workers: int, progress: Reporter) -> None:
        """Make all parts with workers, and write the corpus."""
        alone = workers == 1 and engine == "local"
        part = replace(self, merge=False, progress=progress if alone else SILENT)

        def run(work: Callable[[Any, int, int], object], tasks: int = count) -> None:
            reporter = SILENT if alone else progress
            # Other tasks than parts may be fewer than the workers.
            started = workers if tasks == count else min(workers, tasks)
            run_parts(work, tasks, engine=engine, workers=started, progress=reporter)

        if not (self.partial / layout.META_FILE).is_file():
            if self.filters.near_duplicates:
                run(part.sign)
                if part.drop_repeated(count, self.near_duplicates.signed):
                    run(part.sign)
                run(self.near_duplicates.compare, self.near_duplicates.buckets())
                self.near_duplicates.cluster()
            if self.tokenizer is None and not self.trained.is_dir():
                run(part.sample)
                if part.drop_repeated(count, part._sample):
                    run(part.sample)
                part.train(progress)
            run(part)
            with self._room():
                repeated = part.drop_repeated(count, Parts(self.out, count).part)
            if repeated:
                run(part)
        part.finish(count)

    def train(self, progress: Reporter) -> None:
        """Train a tokenizer on the samples of all parts."""
        with progress.task("Training the tokenizer", None, "tokens"):
            texts = sampling.read_samples(sorted(self.steps.glob("sample-*.parquet")))
            trained = train_tokenizer(texts, self.vocab_size)
            with atomic_directory(self.trained) as directory:
                trained.save_pretrained(directory)

    def finish(self, count: int) -> None:
        """Write the corpus of all parts, unless another process has just done so."""
        parts = Parts(self.out, count)
        if not parts.path.is_dir():
            return
        run = self._check_plan()
        if not (parts.path / layout.META_FILE).is_file():
            parts.check(run, names=PARTS)
        with writing(parts.path, wait=True), self._room():
            if not (parts.path / layout.META_FILE).is_file():
                for number in self.drop_repeated(count, parts.part):
                    self._write(parts.part(number), number, count)
                self._merge(parts)
            meta = read_json(parts.path / layout.META_FILE)
            names = {name for shard in meta["shards"] for name in shard["files"]}
            names |= {layout.META_FILE, layout.TOKENIZER_DIRECTORY, PLAN_FILE}
            for path in parts.path.iterdir():
                if path.name not in names:
                    _remove(path)
            replace_directory(parts.path, self.out)
            # Without its plan, what is finished would be taken for other parts and discarded.
            (self.out / PLAN_FILE).unlink()

    def _merge(self, parts: Parts) -> None:
        tokenizer = self.open_tokenizer()
        assert tokenizer is not None
        more: dict[str, Any] = {}
        directories = [parts.part(number) for number in range(parts.count)]
        if isinstance(self.inputs, HubDataset):
            settings = self.columns, tokenizer, self.heldout_fraction
            more["origin"] = origin_of(self.inputs, *settings)
        elif self.inputs is not None:
            more["read"] = self._manifest(directories)
        merge_parts(directories, parts.path, tokenizer, self.heldout_fraction, **more)

    def _manifest(self, parts: list[Path]) -> dict[str, Any]:
        """Return the entry ``read`` of ``corpus.json``."""
        documents = Counter[str]()
        for part in parts:
            documents.update(read_json(part / PART_FILE)["read"])
        files = [
            {"name": file.name, "bytes": file.size, "documents": documents[str(file.path)]}
            for file in self.inputs
        ]
        others = {name: value for name, value in (self.listed or {}).items() if name != "run"}
        return {"files": files} | others

    def drop_repeated(self, count: int, result: Callable[[int], Path]) -> list[int]:
        """Remove results of parts with an id of an earlier part, which make them again without it.

        An id is judged before the filters: the first document in the order of the input keeps it.
        InputError for such an id, unless bad rows are left out.
        """
        paths = [self._ids(number) for number in range(count)]
        repeated = _repeated_ids(paths)
        if repeated and (not self.skip_bad_rows or self.inputs is None):
            number = min(repeated)
            second, doc_id = self._locate(number, count, repeated[number])
            key = layout.id_hash(doc_id) if doc_id else repeated[number][0]
            earlier = next(n for n, path in enumerate(paths) if np.uint64(key) in np.load(path))
            first, same_id = self._locate(earlier, count, [key])
            raise InputError(f"{repeated_id(second, doc_id or same_id, first)} Fix the row.")
        for number, hashes in repeated.items():
            _save(self._used(number), np.array(hashes, np.uint64))
            _remove(result(number))
        return sorted(repeated)

    def _locate(self, number: int, count: int, hashes: list[int]) -> tuple[str, str]:
        """Return where a part first has one of these hashes of ids, and the id."""
        keys = {*hashes}
        if self.inputs is not None:
            return self.reader(number, count, self.open_tokenizer()).locate(keys)
        # Documents of the steps before cannot be read again, and filters may have left it out.
        tables = sorted(Parts(self.out, count).part(number).glob("documents-*.parquet"))
        ids = (i for path in tables for i in pq.read_table(path)["doc_id"].to_pylist())
        return f"part {number + 1} of {count}", next(
            (i for i in ids if layout.id_hash(i) in keys), ""
        )


def open_reader(
    inputs: Any, columns: Columns | None, skip_bad_rows: bool | None, **how: Any
) -> DocumentReader:
    """Return a reader of the inputs of a corpus, which leaves out chats without an answer."""
    kind: Any = DatasetReader if isinstance(inputs, HubDataset) else DocumentReader
    return kind(inputs, columns, skip_bad_rows=skip_bad_rows, answered_chats=True, **how)


def _absolute(path: Path) -> Path:
    return path.absolute() if isinstance(path, Path) else path


def _repeated_ids(paths: Sequence[Path]) -> dict[int, list[int]]:
    """Return, by part, the hashes of ids that an earlier part has too; one file is open at once."""
    total = sum(len(np.load(path, mmap_mode="r")) for path in paths)
    ranges = max(1, total // IDS_AT_ONCE)
    bounds = [np.uint64((2**64 - 1) * n // ranges) for n in range(ranges + 1)]
    repeated = dict[int, list[int]]()
    for low, high in pairwise(bounds):
        chosen = list[np.ndarray]()
        for path in paths:
            ids = np.load(path, mmap_mode="r")
            begin, end = np.searchsorted(ids, low), np.searchsorted(ids, high, side="right")
            chosen.append(np.array(ids[begin:end]))
        keys = np.concatenate(chosen)
        owners = np.repeat(np.arange(len(paths)), [len(ids) for ids in chosen])
        order = np.argsort(keys, kind="stable")
        again = order[1:][keys[order[1:]] == keys[order[:-1]]]
        for number, key in zip(owners[again].tolist(), keys[again].tolist(), strict=True):
            repeated.setdefault(number, []).append(key)
    return repeated


def _save(path: Path, hashes: np.ndarray) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.save(file, hashes)


def _remove(path: Path) -> None:
    """Remove a file or directory; a directory's name is free at once."""
    if path.is_dir():
        discard(path)
    else:
        path.unlink(missing_ok=True)


def _reporting(
    documents: Iterator[Document], reader: DocumentReader, task: Task
) -> Iterator[Document]:
    done = 0
    for number, document in enumerate(documents):
        yield document
        if number % 256 == 0:
            task.advance(reader.done - done)
            done = reader.done


def origin_of(
    dataset: HubDataset,
    columns: Columns | None,
    tokenizer: PreTrainedTokenizerFast,
    heldout_fraction: float,
) -> dict[str, Any]:
    """Return the entry ``origin`` of ``corpus.json``."""
    settings = {"tokenizer": fingerprint(tokenizer), "heldout_fraction": heldout_fraction}
    return dataset.origin(columns) | settings
