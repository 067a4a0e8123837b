"""A dataset streamed into a corpus that an interruption does not throw away.

Closed shards and the place in the stream behind them are kept in ``.NAME.partial`` beside the
corpus. What else a writer knows (digests, counts, the ids that were seen) follows from the closed
shards, which are read again; the finished corpus is the same, byte for byte, as one that was never
interrupted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismlm.corpus import layout
from prismlm.corpus.build import (
    BuildSettings,
    check_build,
    document_batches,
    encode_documents,
    origin_of,
)
from prismlm.corpus.datasets import BEGINNING, DatasetReader, HubDataset, Position
from prismlm.corpus.documents import Columns, Document
from prismlm.corpus.read import SeenIds
from prismlm.corpus.store import Corpus
from prismlm.corpus.writer import CorpusWriter
from prismlm.errors import InputError, Interrupted
from prismlm.files import WAY_OUT, room_to_write, write_json
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import check_same, read_note, writing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHARD_TOKENS = 2**24
STATE_FILE = "build.json"
STATE_VERSION = 2


def stream_corpus(
    dataset: HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerFast,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
    skip_bad_rows: bool = False,
    wait: bool = False,
    progress: Reporter = SILENT,
) -> Corpus:
    """Stream a dataset into a corpus directory, go on where that was interrupted, or open it.

    Called again after an interruption, a kill or a network that failed, it goes on behind the last
    shard that was closed. Called again after the end, it opens the corpus without reading the
    dataset; that the dataset has changed since is not noticed.

    Args:
        dataset: what to read.
        out: the corpus directory.
        tokenizer: the tokenizer of the model that will read the corpus.
        columns: which columns hold the text and what is known about it.
        heldout_fraction: the share of documents to hold out, in [0, 1).
        shard_tokens: a shard ends before the document that would take it beyond this; it is also
            the most that an interruption loses.
        skip_bad_rows: leave out rows that cannot be used; ``corpus.json`` counts them by reason.
        wait: while another process writes ``out``, wait and then open what it wrote.
        progress: where to show the work; its unit is rows.

    Raises:
        InputError: ``out`` holds something else, or was begun from something else; or as of
            :func:`build_corpus`.
        FormatError: what an interruption left is damaged.
    """
    target = Path(out)
    settings = BuildSettings.of(tokenizer, heldout_fraction, shard_tokens)
    origin = origin_of(dataset, columns, settings)
    with writing(target, wait=wait):
        there = _existing(target, origin, settings)
        if there is not None:
            return there
        partial = target.with_name(f".{target.name}.partial")
        saved = _begin(partial, origin)
        room = room_to_write(f"the corpus {target}", target.parent, WAY_OUT)
        with room, _keeping(partial):
            reader = DatasetReader(
                dataset,
                columns,
                tokenizer=tokenizer,
                skip_bad_rows=skip_bad_rows,
                answered_chats=True,
            )
            _stream(partial, reader, settings, origin, saved, progress)
        # In this order, so that a kill in between leaves the whole corpus.
        os.rename(partial, target)
        (target / STATE_FILE).unlink(missing_ok=True)
    return Corpus.open(target)


def existing_corpus(
    dataset: HubDataset,
    out: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerFast,
    columns: Columns | None = None,
    heldout_fraction: float = 0.05,
) -> Corpus | None:
    """Return the corpus that :func:`stream_corpus` would open without reading, or None.

    Raises:
        InputError: ``out`` holds something else, or was made of something else.
        FormatError: the corpus is damaged.
    """
    settings = BuildSettings.of(tokenizer, heldout_fraction, SHARD_TOKENS)
    return _existing(Path(out), origin_of(dataset, columns, settings), settings)


def _existing(target: Path, origin: dict[str, Any], settings: BuildSettings) -> Corpus | None:
    if not layout.is_corpus(target):
        held_out, tokens = settings.heldout_fraction, settings.shard_tokens
        check_build(target, "", 0, held_out, tokens, overwrite=False)
        return None
    corpus = Corpus.open(target)
    _check_same(corpus.meta.get("origin"), origin, f"{target} is a corpus that was built")
    (target / STATE_FILE).unlink(missing_ok=True)
    return corpus


def _check_same(before: Any, origin: dict[str, Any], what: str) -> None:
    if not isinstance(before, dict):
        raise InputError(f"{what} from files, not from a dataset. Choose another --corpus.")
    way_out = "Resume that one, choose another --corpus, or remove it."
    check_same(f"{what} from another input", before, origin, way_out)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a build has kept: closed shards, and a place in the stream before their end.

    Attributes:
        shards: the closed shards.
        position: a place in the stream at or before the end of the last of them.
        documents: how many documents lie before that place.
    """

    shards: list[dict[str, Any]]
    position: Position
    documents: int

    @property
    def in_shards(self) -> int:
        """How many documents the closed shards hold."""
        return sum(shard["documents"] for shard in self.shards)


def _begin(partial: Path, origin: dict[str, Any]) -> _Saved:
    """Return what was kept and remove what was not closed, or begin anew."""
    state = partial / STATE_FILE
    if not state.is_file():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return _Saved([], BEGINNING, 0)
    found = read_note(state, partial, version=STATE_VERSION)
    _check_same(found["origin"], origin, f"{partial} holds what was begun")
    kept = {STATE_FILE, *(name for shard in found["shards"] for name in shard["files"])}
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()
    return _Saved(found["shards"], Position(**found["position"]), found["documents"])


@contextmanager
def _keeping(partial: Path) -> Iterator[None]:
    """Leave nothing behind a failure that left nothing to go on from; else say that it did."""
    try:
        yield
    except BaseException as error:
        if not (partial / STATE_FILE).is_file():
            shutil.rmtree(partial, ignore_errors=True)
        elif isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"the shards that were closed are kept in {partial}. Run the same command "
                "again to resume."
            ) from error
        raise


def _stream(
    partial: Path,
    reader: DatasetReader,
    settings: BuildSettings,
    origin: dict[str, Any],
    kept: _Saved,
    progress: Reporter,
) -> None:
    with (
        settings.writer(partial) as writer,
        progress.task("Tokenising", reader.num_rows, "rows") as task,
    ):
        documents, before, done = _resumed(reader, writer, kept), BEGINNING, kept.in_shards
        if done:
            task.note(f"{done:,} documents were kept")
        for batch in document_batches(documents):
            for document, ids in zip(batch, encode_documents(settings, batch), strict=True):
                writer.add(document, ids)
                if len(writer.shards) > len(kept.shards):
                    kept = _Saved(list(writer.shards), kept.position, kept.documents)
                    noted = {"version": STATE_VERSION, "origin": origin, **asdict(kept)}
                    write_json(partial / STATE_FILE, noted)
            done += len(batch)
            kept = _Saved(kept.shards, reader.position(), done)
            task.advance(reader.row - before.row)
            before = kept.position
        settings.finish(partial, writer, reader.left_out, {"origin": origin})


def _resumed(reader: DatasetReader, writer: CorpusWriter, saved: _Saved) -> Iterator[Document]:
    """Take the closed shards as written; return the documents behind them."""
    seen = SeenIds()
    for number, document in enumerate(writer.resume(saved.shards)):
        # Those behind the place in the stream are read again, and then must not count as seen.
        if number < saved.documents:
            seen.add(document.doc_id)
    again = saved.in_shards - saved.documents
    return islice(reader.documents_from(saved.position, seen), again, None)
