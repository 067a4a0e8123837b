"""Building a corpus directory in parts, by any number of workers.

A part reads its share of the input and writes shards; the last step moves the shards of all parts
together. Documents are in the order of the input, whatever the numbers of parts and workers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
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
from prismlm.corpus.writer import IDS_FILE, PART_FILE, PartWriter, merge_parts
from prismlm.errors import (
    InputError,
    check_kind,
    check_number,
    check_whole,
)
from prismlm.files import (
    atomic_directory,
    discard,
    read_json,
    room_to_write,
    write_json,
)
from prismlm.outputs import check_outputs
from prismlm.parts import Engine, Parts, run_parts
from prismlm.progress import SILENT, Reporter, Task
from prismlm.run_state import RUN_FILE, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARD_TOKENS = 2**27
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
        listed: another process has listed the input, and checked the arguments.

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
    listed: bool = False
    progress: Reporter = SILENT

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write a part, unless it is finished; the last one writes the corpus."""
        parts = Parts(self.out, world_size)
        if not self.listed:
            self._check_alone(data)
            self.list_inputs(world_size)
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
        elif not isinstance(inputs, (str, os.PathLike)) and not is_remote(inputs):
            inputs = list(inputs)  # which can be pickled
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

    def list_inputs(self, count: int, reader: DocumentReader | None = None) -> None:
        """Record the input of all parts; InputError for finished parts of another one."""
        self.check()
        if reader is None and self.inputs is not None:
            reader = self.open_inputs(self.inputs)
        plan: dict[str, Any] = {"files": None, "not_read": {}, "named_again": 0}
        if reader is not None and not isinstance(self.inputs, HubDataset):
            files = [[_address(file.path), file.name, list(file.state)] for file in reader.files]
            again = reader.duplicates
            plan = {"files": files, "not_read": reader.ignored, "named_again": again}
        plan["run"] = self._run(count, plan["files"])
        parts = Parts(self.out, count)
        path = parts.path / PLAN_FILE
        before = read_json(path) if path.is_file() else None
        if before is not None and any(parts.path.glob(PARTS)) and not self.overwrite:
            _check_listed(self.out, before["files"], plan["files"])
        parts.check(plan["run"], overwrite=self.overwrite, names=PARTS)
        with writing(parts.path, wait=True):
            if before is None or before["run"] != plan["run"]:
                for name in (STEPS, layout.TOKENIZER_DIRECTORY):
                    shutil.rmtree(parts.path / name, ignore_errors=True)
                (parts.path / layout.META_FILE).unlink(missing_ok=True)
                parts.path.mkdir(exist_ok=True)
                write_json(path, plan)

    def _run(self, count: int, files: list[Any] | None) -> dict[str, Any]:
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
        return run | {"columns": asdict(self.columns), "files": fingerprints.of_json(files)}

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

    def _plan(self) -> dict[str, Any]:
        return read_json(self.partial / PLAN_FILE)

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
        if not isinstance(inputs, HubDataset):
            options = _store_options(inputs)
            inputs: Any = [
                InputFile(_path_at(address, options), name, tuple(state))
                for address, name, state in self._plan()["files"]
            ]
            # This process may have listed them long ago.
            for store in {file.path.fs for file in inputs if is_remote(file.path)}:
                store.invalidate_cache()
        return self.open_inputs(inputs, tokenizer=tokenizer, share=(rank, count))

    def documents(
        self, reader: DocumentReader, rank: int, used: Sequence[str] = ()
    ) -> Iterator[Document]:
        """Yield the documents of a part that the filters keep, without ids that are ``used``."""
        removed = self.near_duplicates.of_part(rank) if self.filters.near_duplicates else ()
        for number, document in enumerate(self.filtered(reader)):
            if number in removed:
                reader.leave_out(NEAR_DUPLICATE)
            elif document.doc_id in used:
                reader.leave_out(repeated_id("", document.doc_id).reason)
            else:
                yield document

    def filtered(self, reader: DocumentReader) -> Iterator[Document]:
        """Yield the documents of a part, with near-duplicates."""
        for document in reader:
            if (reason := self.filters.reason(document)) is None:
                yield document
            else:
                reader.leave_out(reason)

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
        self.near_duplicates.sign(self.filtered(reader), rank)

    def sample(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Write a sample of a part, to train a tokenizer on."""
        path = self.steps / f"sample-{rank:05d}.parquet"
        with writing(path):
            if not path.is_file():
                reader = self.reader(rank, world_size)
                with self._task("Sampling text", reader, rank, world_size) as task:
                    documents = _reporting(self.documents(reader, rank), reader, task)
                    sampling.write_sample(documents, path)

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

    def _write(
        self, directory: Path, rank: int, count: int, data: Any = None, used: Sequence[str] = ()
    ) -> None:
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
            for _ in writer.write(self.documents(reader, rank, used)):
                task.advance(reader.done - done)
                done = reader.done
            writer.finish(reader.left_out, reader.documents)
            write_json(new / RUN_FILE, self._plan()["run"])

    def build(self, count: int, engine: Engine, workers: int, progress: Reporter) -> None:
        """Make all parts with workers, and write the corpus."""
        alone = workers == 1 and engine == "local"
        part = replace(self, listed=True, merge=False, progress=progress if alone else SILENT)

        def run(work: Callable[[Any, int, int], object], tasks: int = count) -> None:
            reporter = SILENT if alone else progress
            # Other tasks than parts may be fewer than the workers.
            started = workers if tasks == count else min(workers, tasks)
            run_parts(work, tasks, engine=engine, workers=started, progress=reporter)

        if not (self.partial / layout.META_FILE).is_file():
            if self.filters.near_duplicates:
                run(part.sign)
                run(self.near_duplicates.compare, self.near_duplicates.buckets())
                self.near_duplicates.cluster()
            if self.tokenizer is None and not self.trained.is_dir():
                run(part.sample)
                part.train(progress)
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
        plan = self._plan()
        if not (parts.path / layout.META_FILE).is_file():
            parts.check(plan["run"], names=PARTS)
        with writing(parts.path, wait=True), self._room():
            if not (parts.path / layout.META_FILE).is_file():
                self._check_ids(parts)
                self._merge(parts, plan)
            meta = read_json(parts.path / layout.META_FILE)
            names = {name for shard in meta["shards"] for name in shard["files"]}
            names |= {layout.META_FILE, layout.TOKENIZER_DIRECTORY, PLAN_FILE}
            for path in parts.path.iterdir():
                if path.is_dir() and path.name not in names:
                    shutil.rmtree(path)
                elif path.name not in names:
                    path.unlink(missing_ok=True)
            (parts.path / PLAN_FILE).unlink()
            with atomic_directory(self.out) as empty:
                os.replace(parts.path, empty)

    def _merge(self, parts: Parts, plan: dict[str, Any]) -> None:
        tokenizer = self.open_tokenizer()
        assert tokenizer is not None
        more: dict[str, Any] = {}
        directories = [parts.part(number) for number in range(parts.count)]
        if isinstance(self.inputs, HubDataset):
            settings = self.columns, tokenizer, self.heldout_fraction
            more["origin"] = origin_of(self.inputs, *settings)
        elif plan["files"] is not None:
            more["read"] = _manifest(plan, directories)
        merge_parts(directories, parts.path, tokenizer, self.heldout_fraction, **more)

    def _check_ids(self, parts: Parts) -> None:
        """Raise InputError for an id in several parts, or leave out all but its first document."""
        repeated = _repeated_ids(parts)
        for doc_id, numbers in repeated.items():
            if not self.skip_bad_rows or self.inputs is None:
                first, second = (self._place(n, parts.count, doc_id) for n in numbers[:2])
                raise InputError(f"{repeated_id(second, doc_id, first)} Fix the row.")
        for number in sorted({n for numbers in repeated.values() for n in numbers[1:]}):
            used = [doc_id for doc_id, numbers in repeated.items() if number in numbers[1:]]
            discard(parts.part(number))
            self._write(parts.part(number), number, parts.count, used=used)

    def _place(self, number: int, count: int, doc_id: str) -> str:
        if self.inputs is None:
            return f"part {number + 1} of {count}"
        return self.reader(number, count, self.open_tokenizer()).locate(doc_id)


def open_reader(
    inputs: Any, columns: Columns | None, skip_bad_rows: bool | None, **how: Any
) -> DocumentReader:
    """Return a reader of the inputs of a corpus, which leaves out chats without an answer."""
    kind: Any = DatasetReader if isinstance(inputs, HubDataset) else DocumentReader
    return kind(inputs, columns, skip_bad_rows=skip_bad_rows, answered_chats=True, **how)


def _address(path: Any) -> str:
    return str(path.absolute() if isinstance(path, Path) else path)


def _store_options(inputs: Any) -> dict[str, dict[str, Any]]:
    """Return the options of the stores of UPath objects, by protocol: they are not written down."""
    is_one = isinstance(inputs, (str, os.PathLike)) or is_remote(inputs)
    paths: Any = [inputs] if is_one else inputs
    return {path.protocol: dict(path.storage_options) for path in paths if is_remote(path)}


def _path_at(address: str, options: Mapping[str, dict[str, Any]]) -> Path:
    """Return the path of a listed file; a store is not asked yet."""
    protocol, separator, _ = address.partition("://")
    if not separator:
        return Path(address)
    from upath import UPath

    path: Any = UPath(address, **options.get(protocol, {}))
    return path


def _check_listed(out: Path, before: list[Any] | None, now: list[Any] | None) -> None:
    """Raise InputError if the input is not what was listed before; it names a file."""
    if before is None or now is None or before == now:
        return
    old, new = ({address: state for address, _, state in files} for files in (before, now))
    changed = [address for address in {**old, **new} if old.get(address) != new.get(address)]
    name = changed[0] if changed else "the order of its files"
    what = "is missing" if name not in new else "has changed" if name in old else "is new"
    raise InputError(
        f"{out} was started with another input: {name} {what if changed else 'has changed'}. Put "
        "it back, choose another output, or start over with --overwrite."
    )


def _manifest(plan: dict[str, Any], parts: list[Path]) -> dict[str, Any]:
    """Return the entry ``read`` of ``corpus.json``."""
    documents = dict[str, int]()
    for part in parts:
        for address, count in read_json(part / PART_FILE)["read"].items():
            documents[address] = documents.get(address, 0) + count
    files = [
        {"name": name, "bytes": state[0], "documents": documents.get(address, 0)}
        for address, name, state in plan["files"]
    ]
    not_read = dict(sorted(plan["not_read"].items()))
    return {"files": files, "named_again": plan["named_again"], "not_read": not_read}


def _repeated_ids(parts: Parts) -> dict[str, list[int]]:
    """Return ids that several parts have, with the parts; ids are compared by their hashes."""
    hashes = [np.load(parts.part(n) / IDS_FILE, mmap_mode="r") for n in range(parts.count)]
    ranges = max(1, sum(map(len, hashes)) // IDS_AT_ONCE)
    bounds = [np.uint64(2**64 * n // ranges) for n in range(1, ranges)]
    cuts = [[0, *np.searchsorted(ids, bounds), len(ids)] for ids in hashes]
    repeated = set[int]()
    for at in range(ranges):
        chosen = [ids[cut[at] : cut[at + 1]] for ids, cut in zip(hashes, cuts, strict=True)]
        together = np.sort(np.concatenate(chosen))
        repeated.update(together[1:][together[1:] == together[:-1]].tolist())
    places = dict[str, list[int]]()
    if repeated:
        for number in range(parts.count):
            for path in sorted(parts.part(number).glob("documents-*.parquet")):
                for doc_id in pq.read_table(path, columns=["doc_id"])["doc_id"].to_pylist():
                    if layout.id_hash(doc_id) in repeated:
                        places.setdefault(doc_id, []).append(number)
    return {doc_id: numbers for doc_id, numbers in places.items() if len(numbers) > 1}


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
