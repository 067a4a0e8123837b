"""Hidden states of a corpus: the forward passes, and a store on disk.

The store has ``states.npy``, d bfloat16 numbers for every position that predicts a token of its
document, ``next-tokens.npy``, that token, and ``states.json``, the settings and the end of each
block. The order of blocks spreads the first of them over the corpus, so that a store limited in
size is an even sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.corpus.windows import PASS_TOKENS, BlockOrder, split_counts, window_batches
from prismlm.errors import InputError
from prismlm.files import atomic_file, room_to_write, write_json
from prismlm.lens.layout import array_file, open_array
from prismlm.lens.options import IndexOptions, Shard
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import read_note

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

Append = Callable[[np.ndarray], None]
STATES_FILE, TOKENS_FILE, META_FILE = "states.npy", "next-tokens.npy", "states.json"
FORMAT_VERSION = 2
WHOLE = Shard()
ADVICE = "Remove the directory to read the states again."
# Small passes leave a GPU idle; larger ones need more memory.
GPU_PASS_TOKENS = 4 * PASS_TOKENS
# Logits computed at once: 2 MB, to stay in the cache, but of rows enough to amortise reading W.
LOGITS_AT_ONCE, MIN_ROWS = 2**19, 192


def drawn(windows: np.ndarray, share: float) -> np.ndarray:
    """Return which windows belong to a sample: bool [n].

    It is by the SplitMix64 hash of the position of their first token, so that a smaller sample is
    part of a larger one.
    """
    if share >= 1:
        return np.ones(len(windows), dtype=bool)
    x = windows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) < np.uint64(int(share * 2**63) * 2)


def passes(
    model: PreTrainedModel,
    corpus: Corpus,
    order: BlockOrder,
    slot: int,
    options: IndexOptions,
    share: float = 1.0,
) -> Iterator[tuple[WindowBatch, Tensor]]:
    """Yield the forward passes of the ``slot``-th block, with the positions that give a state.

    These, bool [B, T], are owned by their window and predict a token of their document. ``share``
    of the windows are read.
    """
    windows = options.split, options.window, options.stride
    grid = order.windows(slot, corpus, *windows)
    if share < 1:
        rows, names = drawn(grid.start, share), ("document", "start", "length", "skip")
        grid = replace(grid, **{name: getattr(grid, name)[rows] for name in names})
    for batch in window_batches(grid, corpus, pass_tokens(model.device), corpus.eos_token_id):
        yield batch, predicting(batch, corpus)


def pass_tokens(device: torch.device) -> int:
    """Return the most positions of a forward pass."""
    return PASS_TOKENS if device.type == "cpu" else GPU_PASS_TOKENS


def predicting(batch: WindowBatch, corpus: Corpus) -> Tensor:
    """Return which positions of a batch give a state, bool [B, T]."""
    ends = batch.input_ids == corpus.eos_token_id
    # Some tokenizers start a text with the token that ends it.
    ends[:, : len(corpus.prefix)] = False
    return batch.owned & ~ends


def states_of(
    model: PreTrainedModel, batch: WindowBatch, owned: Tensor, *, bf16: bool = False
) -> Tensor:
    """Return the hidden states of a forward pass, [B, T, d]."""
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    with (
        torch.autocast(model.device.type, torch.bfloat16, enabled=bf16),
        capture(model, logits=False) as captured,
    ):
        model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    if not torch.isfinite(captured.z[owned.to(captured.z.device)]).all():
        raise InputError(
            "a hidden state is not finite: the model's weights hold NaN or infinity. Use a "
            "checkpoint from before training diverged."
        )
    return captured.z


def next_tokens(batch: WindowBatch, owned: Tensor, corpus: Corpus) -> Tensor:
    """Return the token that follows each owned position, int64 [n].

    At the last token of a window it is read from the corpus.
    """
    following, last = torch.roll(batch.input_ids, -1, 1), batch.attention_mask.sum(1) - 1
    for row in owned[torch.arange(len(last)), last].nonzero()[:, 0].tolist():
        start = int(batch.positions[row, last[row]]) + 1
        following[row, last[row]] = int(corpus.tokens(start, 1)[0])
    return following[owned]


def probabilities(
    model: PreTrainedModel, z: Tensor, tokens: Tensor, *, bf16: bool = False
) -> Tensor:
    """Return the model's probability of one token after each state, float32 [N].

    In bfloat16 the relative error is a few percent.
    """
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    weight, bias = embedding.weight, getattr(embedding, "bias", None)
    assert isinstance(weight, Tensor)
    if bf16:
        weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    chances = torch.empty(len(z), device=z.device)
    rows = max(MIN_ROWS, LOGITS_AT_ONCE // len(weight))
    for first in range(0, len(z), rows):
        part = slice(first, first + rows)
        # Stored states are float32, whatever the dtype of the model.
        logits = functional.linear(z[part].to(weight.dtype), weight, bias).float()
        chances[part] = logit_map(logits).softmax(-1).gather(1, tokens[part, None])[:, 0]
    return chances


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Stored hidden states."""

    run: dict[str, Any]  # the settings that they were read with
    ends: list[int]  # of each block, after a 0
    bits: np.ndarray  # of bfloat16 numbers, int16 [n, d]
    following: np.ndarray  # the token that follows each, [n]

    @classmethod
    def open(cls, directory: Path) -> HiddenStates:
        """Memory-map a store; FormatError if a file is damaged."""
        meta = read_note(directory / META_FILE, directory, format_version=FORMAT_VERSION)
        bits = open_array(directory / STATES_FILE, ADVICE).reshape(-1, meta["width"])
        following = open_array(directory / TOKENS_FILE, ADVICE)
        return cls(meta["run"], [0, *meta["ends"]], bits, following)

    @property
    def width(self) -> int:
        """d."""
        return self.bits.shape[1]

    def __len__(self) -> int:
        return self.ends[-1]

    def states(self, rows: np.ndarray | slice) -> Tensor:
        """Return the states of some rows, float32 [n, d]."""
        return torch.from_numpy(np.array(self.bits[rows])).view(torch.bfloat16).float()

    def tokens(self, rows: np.ndarray | slice = slice(None)) -> Tensor:
        """Return the tokens that follow some rows, by default all, int64 [n]."""
        return torch.from_numpy(self.following[: len(self)][rows].astype(np.int64))

    def of_block(self, slot: int) -> Tensor | None:
        """Return the states of the ``slot``-th block, float32; None if it is not stored."""
        ends = self.ends[slot : slot + 2]
        return self.states(slice(*ends)) if len(ends) == 2 else None


def bytes_per_position(width: int) -> int:
    """Return the disk space of a position: d bfloat16 numbers and the token that follows."""
    return 2 * width + 4


def read_states(
    model: PreTrainedModel,
    corpus: Corpus,
    directory: Path,
    options: IndexOptions,
    *,
    limit_bytes: float,
    shard: Shard = WHOLE,
    progress: Reporter = SILENT,
) -> HiddenStates:
    """Read a corpus with a model and store its hidden states, or open them if they are there.

    As many blocks are read as have ``limit_bytes`` in all, on average; of these a process reads its
    ``shard``, and :func:`join_states` puts all of them together.

    Raises:
        InputError: the directory has states of something else; a state is not finite.
    """
    run: dict[str, Any] = {"model": fingerprints.of_model(model), "corpus": corpus.fingerprint}
    run |= {name: getattr(options, name) for name in ("split", "window", "stride", "bf16")}
    run["limit_bytes"] = limit_bytes
    run |= {} if shard == WHOLE else {"shard": [shard.number, shard.count]}
    if (directory / META_FILE).is_file():
        stored = HiddenStates.open(directory)
        if stored.run != run:
            raise InputError(
                f"{directory} holds the hidden states of another model, corpus or setting. "
                "Restore the former settings, or remove it."
            )
        return stored
    directory.mkdir(parents=True, exist_ok=True)
    width = weight_of(model).shape[1]
    most = int(limit_bytes / bytes_per_position(width))
    documents, tokens = split_counts(corpus, options.split)
    ends, order, predictions = [0], BlockOrder.for_tokens(corpus.num_tokens), tokens - documents
    blocks = order.count if predictions <= most else max(1, order.count * most // predictions)
    edges = (blocks * number // shard.count for number in (shard.number, shard.number + 1))
    with (
        _new_store(directory) as (add_states, add_tokens),
        evaluating(model),
        progress.task("Reading hidden states", min(predictions, most), "tokens") as task,
    ):
        for slot in range(*edges):
            ends.append(ends[-1])
            for batch, owned in passes(model, corpus, order, slot, options):
                with torch.inference_mode():
                    z = states_of(model, batch, owned, bf16=options.bf16)
                states = z[owned.to(z.device)].bfloat16().cpu()
                add_states(states.view(torch.int16).numpy().reshape(-1))
                add_tokens(next_tokens(batch, owned, corpus).numpy())
                ends[-1] += len(states)
                task.advance(len(states))
    return _finish(directory, run, width, ends)


@contextmanager
def _new_store(directory: Path) -> Iterator[tuple[Append, Append]]:
    """Yield what appends states, as bits, and the tokens that follow them."""
    with (
        room_to_write("hidden states", directory, "Make room or lower --states-gb."),
        atomic_file(directory / STATES_FILE) as states_file,
        atomic_file(directory / TOKENS_FILE) as tokens_file,
        array_file(states_file, np.dtype("<i2")) as add_states,
        array_file(tokens_file, np.dtype("<u4")) as add_tokens,
    ):
        yield add_states, add_tokens


def _finish(directory: Path, run: dict[str, Any], width: int, ends: list[int]) -> HiddenStates:
    note = {"format_version": FORMAT_VERSION, "run": run, "width": width, "ends": ends[1:]}
    write_json(directory / META_FILE, note)
    return HiddenStates.open(directory)


def join_states(parts: list[HiddenStates], directory: Path) -> None:
    """Store the hidden states of all shards as one process would have."""
    ends, run = [0], {name: value for name, value in parts[0].run.items() if name != "shard"}
    with _new_store(directory) as (add_states, add_tokens):
        for part in parts:
            for start, end in pairwise(part.ends):
                add_states(part.bits[start:end].reshape(-1))
                add_tokens(part.following[start:end])
                ends.append(ends[-1] + end - start)
    _finish(directory, run, parts[0].width, ends)
