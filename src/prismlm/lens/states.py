"""Hidden states of a corpus, read once and kept on disk for all that needs them.

``states.bin`` holds a row of d bfloat16 numbers for every position that predicts a token of its
document, ``next-tokens.bin`` the token that does follow there (uint32, little endian), in the
order in which an index reads a corpus; ``states.json`` says of what, and where each block of it
ends. Blocks come in an order that spreads the first of them over the corpus, so what fits a limit
is an even sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.corpus.windows import PASS_TOKENS, BlockOrder, block_passes, read_block, split_counts
from prismlm.errors import FormatError, InputError
from prismlm.files import room_to_write, write_json
from prismlm.lens.positions import next_tokens
from prismlm.models.evaluating import evaluating
from prismlm.models.seam import capture
from prismlm.models.sidecar import weight_of
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import read_note

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch

STATES_FILE, TOKENS_FILE, META_FILE = "states.bin", "next-tokens.bin", "states.json"
FORMAT_VERSION = 1
# A pass of a CPU's size leaves a GPU waiting for the next. Larger ones need as much more memory.
GPU_PASS_TOKENS = 4 * PASS_TOKENS


class HiddenStates:
    """The states of the blocks that were read, memory-mapped. Open one with :meth:`open`.

    Attributes:
        directory: where the files are.
        width: d.
        run: what they are of, as :func:`read_states` noted it.
    """

    def __init__(self, directory: Path, meta: dict[str, Any]) -> None:
        self.directory, self.run = directory, meta["run"]
        self.width, self._ends = int(meta["width"]), [0, *meta["ends"]]
        sizes = {STATES_FILE: bytes_per_position(self.width) - 4, TOKENS_FILE: 4}
        for path, size in ((directory / name, size) for name, size in sizes.items()):
            if not path.is_file() or path.stat().st_size < len(self) * size:
                raise FormatError(
                    f"{path} is missing or cut off. Remove {directory}, and it is read again."
                )
        if len(self):
            shape = len(self), self.width
            self._states = np.memmap(directory / STATES_FILE, "<u2", "r", shape=shape)
            self._tokens = np.memmap(directory / TOKENS_FILE, "<u4", "r", shape=shape[:1])

    @classmethod
    def open(cls, directory: Path) -> HiddenStates:
        """Open the states in a directory; FormatError if a file is damaged."""
        note = read_note(directory / META_FILE, directory, format_version=FORMAT_VERSION)
        return cls(directory, note)

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
        return fingerprints.of_json([self.run, len(self)])

    def check(self, run: dict[str, Any]) -> None:
        """Raise InputError unless these are the states of what an index is to read."""
        of = ("model", "corpus", "split", "window", "stride")
        other = [name for name in of if self.run[name] != run[name]]
        if other:
            raise InputError(
                f"the hidden states in {self.directory} are of another {' and '.join(other)}: "
                "index without them, or with those settings."
            )

    def states(self, rows: np.ndarray | slice) -> Tensor:
        """Return the states of some rows, float32 [n, d]."""
        numbers = np.array(self._states[rows] if len(self) else np.empty((0, self.width), "<u2"))
        return torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16).float()

    def tokens(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the tokens that follow some rows, int64 [n]; of all rows if none are named."""
        return torch.from_numpy(self._tokens[rows].astype(np.int64))

    def of_block(self, slot: int) -> Tensor | None:
        """Return all states of the ``slot``-th block that is read, float32; None if it was not."""
        return self.states(slice(*self._ends[slot : slot + 2])) if slot < self.blocks else None


def pass_tokens(device: torch.device) -> int:
    """Return how many positions a forward pass has at most."""
    return PASS_TOKENS if device.type == "cpu" else GPU_PASS_TOKENS


def bytes_per_position(width: int) -> int:
    """Return what a position takes on disk: d bfloat16 numbers and the token that follows."""
    return 2 * width + 4


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
    progress: Reporter = SILENT,
) -> HiddenStates:
    """Read a corpus with a model and keep its hidden states, unless they are there already.

    Args:
        model, corpus: the causal language model, and the text.
        directory: where the files are written.
        window, stride: tokens of a window, and between the starts of two.
        limit_bytes: whole blocks are read until the files are this large.
        split: which documents.
        bf16: compute in bfloat16 (autocast).
        progress: shows positions done.

    Raises:
        InputError: the directory holds states of something else; a state is not finite.
        FormatError: what is there is damaged.
        PrismError: the disk is full.
    """
    run = {"model": fingerprints.of_model(model), "corpus": corpus.fingerprint, "split": split}
    run |= {"window": window, "stride": stride, "bf16": bf16, "limit_bytes": limit_bytes}
    if (directory / META_FILE).is_file():
        found = HiddenStates.open(directory)
        if found.run != run:
            raise InputError(
                f"{directory} holds the hidden states of another model, corpus or setting. "
                "Put the former settings back, or remove it."
            )
        return found
    width = weight_of(model).shape[1]
    most = int(limit_bytes / bytes_per_position(width))
    order = BlockOrder.of(corpus.num_tokens)
    documents, tokens = split_counts(corpus, split)
    room = room_to_write("hidden states", directory, "Make room or lower --states-gb.")
    task_of = progress.task("Reading hidden states", min(tokens - documents, most), "tokens")
    writer = Writer(directory, run, width)
    with room, writer, evaluating(model), torch.inference_mode(), task_of as task:
        for slot in range(order.count):
            if slot and writer.rows >= most:
                break
            block = read_block(corpus, order, order.block(slot), split, window, stride)
            size = pass_tokens(model.device)
            for batch, _ in block_passes(block, corpus, corpus.eos_token_id, size):
                owned = predicting(batch, corpus)
                z = states_of(model, batch, owned, bf16=bf16)
                states = z[owned.to(z.device)].bfloat16().cpu()
                writer.add(states, next_tokens(batch, corpus)[owned])
                task.advance(len(states))
            writer.end_block()
    return HiddenStates.open(directory)


def states_of(
    model: PreTrainedModel, batch: WindowBatch, owned: Tensor, *, bf16: bool = False
) -> Tensor:
    """Return the hidden states of a forward pass, [B, T, d]."""
    ids, attended = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    with (
        torch.autocast(model.device.type, torch.bfloat16, enabled=bf16),
        capture(model, logits=False) as seen,
    ):
        model(input_ids=ids, attention_mask=attended.long(), use_cache=False)
    if not torch.isfinite(seen.z[owned.to(seen.z.device)]).all():
        raise InputError("a hidden state is not finite: the model's weights hold NaN or infinity.")
    return seen.z


class Writer:
    """Writes the two files during a ``with`` block, and what they are of if it succeeds."""

    def __init__(self, directory: Path, run: dict[str, Any], width: int) -> None:
        self.directory, self.rows = directory, 0
        self._noted = {"format_version": FORMAT_VERSION, "run": run, "width": width}
        self._ends: list[int] = []

    def __enter__(self) -> Writer:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._files = [(self.directory / name).open("wb") for name in (STATES_FILE, TOKENS_FILE)]
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for file in self._files:
                file.close()
            if kind is None:
                write_json(self.directory / META_FILE, self._noted | {"ends": self._ends})
        finally:
            if not (self.directory / META_FILE).is_file():
                for file in self._files:
                    Path(file.name).unlink(missing_ok=True)

    def add(self, states: Tensor, tokens: Tensor) -> None:
        """Write the states of one forward pass, bfloat16 [n, d], and what follows each."""
        columns = states.view(torch.int16).numpy(), tokens.numpy().astype("<u4")
        for file, column in zip(self._files, columns, strict=True):
            file.write(np.ascontiguousarray(column).data)
        self.rows += len(states)

    def end_block(self) -> None:
        """Note that a block ends here."""
        self._ends.append(self.rows)
