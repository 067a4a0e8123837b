"""Hidden states of a corpus, read once and kept on disk for all that needs them.

``states.bin`` holds a row of d bfloat16 numbers for every position that predicts a token of its
document, ``next-tokens.bin`` the token that does follow there (uint32, little endian), in the
order in which an index reads a corpus; ``states.json`` says of what, and where each block of it
ends. Blocks come in an order that spreads the first of them over the corpus, so what fits a limit
is an even sample.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.corpus.windows import (
    PASS_TOKENS,
    BlockOrder,
    block_passes,
    read_block,
    split_counts,
)
from prismlm.errors import FormatError, InputError
from prismlm.files import room_to_write, write_json
from prismlm.index.positions import next_tokens
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import Interrupts, read_note

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch

STATES_FILE = "states.bin"
TOKENS_FILE = "next-tokens.bin"
META_FILE = "states.json"
FORMAT_VERSION = 1
SAVE_SECONDS = 30.0
# A pass of a CPU's size leaves a GPU waiting for the next. Larger ones need as much more memory.
GPU_PASS_TOKENS = 4 * PASS_TOKENS
# Of a position: bfloat16 numbers, and the token that follows.
BYTES_PER_NUMBER, BYTES_PER_TOKEN = 2, 4


class HiddenStates:
    """The states of the blocks that were read, memory-mapped. Open one with :meth:`open`.

    Attributes:
        directory: where the files are.
        width: d.
        run: what they are of, as :func:`read_states` noted it.
        complete: whether they are all that was to be read.
    """

    def __init__(self, directory: Path, meta: dict[str, Any]) -> None:
        self.directory = directory
        self.width, self.run = int(meta["width"]), meta["run"]
        self.complete = bool(meta["complete"])
        self._ends = [0, *meta["ends"]]
        states, tokens = directory / STATES_FILE, directory / TOKENS_FILE
        row = BYTES_PER_NUMBER * self.width
        for path, size in ((states, row), (tokens, BYTES_PER_TOKEN)):
            if not path.is_file() or path.stat().st_size < len(self) * size:
                raise FormatError(
                    f"{path} is missing or cut off. Remove {directory}, and it is read again."
                )
        if len(self):
            self._states = np.memmap(states, "<u2", "r", shape=(len(self), self.width))
            self._tokens = np.memmap(tokens, "<u4", "r", shape=(len(self),))

    @classmethod
    def open(cls, directory: Path) -> HiddenStates:
        """Open the states in a directory.

        Raises:
            FormatError: a file is missing, cut off, damaged or of another version.
        """
        return cls(
            directory, read_note(directory / META_FILE, directory, format_version=FORMAT_VERSION)
        )

    def __len__(self) -> int:
        """How many positions there are."""
        return self._ends[-1]

    @property
    def blocks(self) -> int:
        """How many blocks of the corpus were read."""
        return len(self._ends) - 1

    @property
    def fingerprint(self) -> str:
        """Of what they are of, and how much of it."""
        return fingerprints.of_json([self.run, self._ends[-1]])

    def check(self, run: dict[str, Any]) -> None:
        """Check that these are the states of what an index is to read.

        Raises:
            InputError: they are of another model, corpus, split, window or stride.
        """
        of = ("model", "corpus", "split", "window", "stride")
        other = [name for name in of if self.run[name] != run[name]]
        if other:
            raise InputError(
                f"the hidden states in {self.directory} are of another {' and '.join(other)}: "
                "index without them, or with those settings."
            )

    def states(self, rows: np.ndarray) -> Tensor:
        """Return the states of some rows, float32 [n, d]."""
        return _floats(self._states[rows])

    def tokens(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the tokens that follow some rows, int64 [n]; of all rows if none are named."""
        return torch.from_numpy(self._tokens[rows].astype(np.int64))

    def of_block(self, slot: int) -> Tensor | None:
        """Return all states of the ``slot``-th block that is read, float32; None if it was not."""
        if slot >= self.blocks:
            return None
        if self._ends[slot] == self._ends[slot + 1]:
            return torch.zeros(0, self.width)
        return _floats(self._states[self._ends[slot] : self._ends[slot + 1]])


def pass_tokens(device: torch.device) -> int:
    """Return how many positions a forward pass has at most."""
    return PASS_TOKENS if device.type == "cpu" else GPU_PASS_TOKENS


def bytes_per_position(width: int) -> int:
    """Return what a position takes on disk."""
    return BYTES_PER_NUMBER * width + BYTES_PER_TOKEN


def predicting(batch: WindowBatch, corpus: Corpus) -> Tensor:
    """Return which positions of a batch give a state: those that predict a token, bool [B, T]."""
    ends = batch.input_ids == corpus.eos_token_id
    # Some tokenizers begin a text with what ends it.
    ends[:, : len(corpus.prefix)] = False
    return batch.owned & ~ends


def read_states(
    model: PreTrainedModel,
    corpus: Corpus,
    directory: Path,
    *,
    window: int,
    stride: int,
    limit_bytes: float,
    split: Split = "train",
    bf16: bool = False,
    save_seconds: float = SAVE_SECONDS,
    progress: Reporter = SILENT,
) -> HiddenStates:
    """Read a corpus with a model and keep its hidden states; go on where an earlier call stopped.

    Args:
        model, corpus: the causal language model, and the text.
        directory: where the files are written.
        window, stride: tokens of a window, and between the starts of two.
        limit_bytes: whole blocks are read until the files are this large.
        split: which documents.
        bf16: compute in bfloat16 (autocast).
        save_seconds: the least time between two notes of how far it is.
        progress: shows positions done.

    Raises:
        InputError: the directory holds states of something else; a state is not finite.
        FormatError: what is there is damaged.
        PrismError: the disk is full; what was noted is kept.
        Interrupted: SIGINT or SIGTERM came; what was read is kept.
    """
    asked = {"split": split, "window": window, "stride": stride}
    of = {"model": fingerprints.of_model(model), "corpus": corpus.fingerprint}
    run = of | asked | {"bf16": bf16, "limit_bytes": limit_bytes}
    writer = Writer(directory, run, weight_of(model).shape[1])
    if writer.complete:
        return HiddenStates.open(directory)
    documents, tokens = split_counts(corpus, split)
    total = min(tokens - documents, int(limit_bytes / writer.row_bytes))
    noted = time.monotonic()
    with (
        writer,
        evaluating(model),
        Interrupts(lambda: _kept(directory)) as interrupts,
        progress.task("Reading hidden states", max(0, total - writer.rows), "tokens") as task,
    ):
        for passes in _blocks(corpus, writer, limit_bytes, pass_tokens(model.device), **asked):
            for batch, _ in passes:
                task.advance(writer.add(*_read(model, corpus, batch, bf16=bf16)))
                if interrupts.received:
                    # Within a block, which may take a minute: what it has is read again.
                    writer.note(complete=False)
                    interrupts.stop()
            writer.end_block()
            if time.monotonic() - noted >= save_seconds:
                writer.note(complete=False)
                noted = time.monotonic()
        writer.note(complete=True)
    return HiddenStates.open(directory)


def _kept(directory: Path) -> str:
    return f"What was read last is kept in {directory}. Run the same command again to resume."


def _blocks(
    corpus: Corpus,
    writer: Writer,
    limit_bytes: float,
    tokens: int,
    *,
    split: Split,
    window: int,
    stride: int,
) -> Iterator[Iterator[tuple[WindowBatch, np.ndarray]]]:
    """Yield the passes of each block that is left, until the files are as large as they may be."""
    order = BlockOrder.of(corpus.num_tokens)
    for slot in range(len(writer.ends), order.count):
        if slot and writer.rows * writer.row_bytes >= limit_bytes:
            break
        block = read_block(corpus, order, order.block(slot), split, window, stride)
        yield block_passes(block, corpus, corpus.eos_token_id, tokens)


@torch.inference_mode()
def _read(
    model: PreTrainedModel, corpus: Corpus, batch: WindowBatch, *, bf16: bool
) -> tuple[Tensor, Tensor]:
    owned = predicting(batch, corpus)
    z = states_of(model, batch, owned, bf16=bf16)
    return z[owned.to(z.device)].bfloat16().cpu(), next_tokens(batch, corpus)[owned]


def states_of(
    model: PreTrainedModel, batch: WindowBatch, owned: Tensor, *, bf16: bool = False
) -> Tensor:
    """Return the hidden states of a forward pass, [B, T, d].

    Raises:
        InputError: one of those that are ``owned``, bool [B, T], is not finite.
    """
    ids, attended = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    with (
        torch.autocast(model.device.type, torch.bfloat16, enabled=bf16),
        capture(model, logits=False) as seen,
    ):
        model(input_ids=ids, attention_mask=attended.long(), use_cache=False)
    z = seen.z
    # The sum is quick and not finite if a state is not; padding may be the reason too.
    if not torch.isfinite(z.float().sum()) and not torch.isfinite(z[owned.to(z.device)]).all():
        raise InputError("a hidden state is not finite: the model's weights hold NaN or infinity.")
    return z


def _floats(numbers: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(numbers).view(np.int16).copy()).view(torch.bfloat16).float()


class Writer:
    """The two files, cut back to what was noted, to which blocks are added."""

    def __init__(self, directory: Path, run: dict[str, Any], width: int) -> None:
        self.directory, self.run, self.width = directory, run, width
        self.ends: list[int] = []
        self.rows, self.complete = 0, False
        self.row_bytes = bytes_per_position(width)
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / META_FILE).is_file():
            before = HiddenStates.open(directory)
            if before.run != run:
                raise InputError(
                    f"{directory} holds the hidden states of another model, corpus or setting. "
                    "Put the former settings back, or remove it."
                )
            self.ends, self.complete = before._ends[1:], before.complete
            self.rows = len(before)

    def __enter__(self) -> Writer:
        row = BYTES_PER_NUMBER * self.width
        sizes = {STATES_FILE: row, TOKENS_FILE: BYTES_PER_TOKEN}
        self._files = [(self.directory / name).open("ab") for name in sizes]
        for file, size in zip(self._files, sizes.values(), strict=True):
            file.truncate(self.rows * size)
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.close()

    def add(self, states: Tensor, tokens: Tensor) -> int:
        """Write the states of one forward pass; return how many."""
        columns = states.view(torch.int16).numpy(), tokens.numpy().astype("<u4")
        with self._room():
            for file, column in zip(self._files, columns, strict=True):
                file.write(np.ascontiguousarray(column).data)
        self.rows += len(states)
        return len(states)

    def end_block(self) -> None:
        """Note, in memory, that a block ends here."""
        self.ends.append(self.rows)

    def note(self, *, complete: bool) -> None:
        """Put what was added where a kill cannot take it, and say that it is there."""
        meta = {"format_version": FORMAT_VERSION, "run": self.run, "width": self.width}
        noted = meta | {"ends": self.ends, "complete": complete}
        with self._room():
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            write_json(self.directory / META_FILE, noted)

    def _room(self) -> AbstractContextManager[None]:
        way_out = (
            f"What was noted before is kept in {self.directory}. Make room or lower --states-gb, "
            "and give the same command again."
        )
        return room_to_write("hidden states", self.directory, way_out)
