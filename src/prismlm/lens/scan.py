"""The forward passes over a corpus: hidden states on disk, and what an index keeps of them.

Stored hidden states have ``states.npy``, d bfloat16 numbers for every position that predicts a
token of its document, ``next-tokens.npy``, that token, and ``states.json``, the settings and the
end of each block. The order of blocks spreads the first of them over the corpus, so that a store
limited in size is an even sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from prismlm import fingerprints
from prismlm.corpus.windows import PASS_TOKENS, BlockOrder, split_counts, window_batches
from prismlm.errors import FormatError, check_finite
from prismlm.files import atomic_file, json_text, room_to_write, write_json
from prismlm.layers import PrototypeHead
from prismlm.lens.cell_files import Run, cells_format, spooled_type, write_run
from prismlm.lens.cells import SAMPLE, CellsMeta, Codes
from prismlm.lens.layout import array_file, open_array
from prismlm.lens.options import IndexOptions, Shard
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.watch import evaluating
from prismlm.ops import top_contexts
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.routing import inverse_norms
from prismlm.progress import SILENT, Reporter
from prismlm.run_state import check_same, read_note

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

STATES_FILE, TOKENS_FILE, META_FILE = "states.npy", "next-tokens.npy", "states.json"
FORMAT_VERSION = 2
# Small passes leave a GPU idle; larger ones need more memory.
GPU_PASS_TOKENS = 4 * PASS_TOKENS
# Logits computed at once: 2 MB, to stay in the cache, but of rows enough to amortise reading W.
LOGITS_AT_ONCE, MIN_ROWS = 2**19, 192
# Cosines computed at once: 64 MiB, except for a single window that has more.
TILE_ELEMENTS = 2**24
# The cosine of a missing position.
ABSENT = -2.0
SCAN_FILE, POSITIONS_FILE = "scan.safetensors", "positions"
# Blocks, spread over the corpus, that the centers of product quantisation are learned from.
SAMPLE_BLOCKS = 512


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


@dataclass(frozen=True)
class Reading:
    """A model in evaluation mode, and the corpus that it reads."""

    model: PreTrainedModel
    corpus: Corpus
    options: IndexOptions

    @cached_property
    def order(self) -> BlockOrder:
        """The order in which the blocks of the corpus are read."""
        return BlockOrder.for_tokens(self.corpus.num_tokens)

    @property
    def documents(self) -> int:
        """The documents of the split."""
        return split_counts(self.corpus, self.options.split)[0]

    @property
    def predictions(self) -> int:
        """All tokens of the split but the last of each document."""
        return split_counts(self.corpus, self.options.split)[1] - self.documents

    def passes(self, slot: int, share: float = 1.0) -> Iterator[tuple[WindowBatch, Tensor]]:
        """Yield the forward passes of the ``slot``-th block, with the positions that give a state.

        These, bool [B, T], are owned by their window and predict a token of their document.
        ``share`` of the windows are read.
        """
        corpus, options = self.corpus, self.options
        grid = self.order.windows(slot, corpus, options.split, options.window, options.stride)
        if share < 1:
            grid = grid.take(drawn(grid.start, share))
        most = pass_tokens(self.model.device)
        for batch in window_batches(grid, corpus, most):
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


@torch.inference_mode()
def states_of(
    model: PreTrainedModel, batch: WindowBatch, owned: Tensor, *, bf16: bool = False
) -> Tensor:
    """Return the hidden states of a forward pass, [B, T, d]."""
    ids, mask = batch.input_ids.to(model.device), batch.attention_mask.to(model.device)
    with (
        evaluating(model),
        torch.autocast(model.device.type, torch.bfloat16, enabled=bf16),
        capture(model, logits=False) as captured,
    ):
        model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    check_finite("hidden states", captured.z[owned.to(captured.z.device)])
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
        bits = open_array(directory / STATES_FILE).reshape(-1, meta["width"])
        following = open_array(directory / TOKENS_FILE)
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
    shard: Shard = IndexOptions.shard,
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
    run |= {} if shard.count == 1 else {"shard": [shard.number, shard.count]}
    if (directory / META_FILE).is_file():
        stored = HiddenStates.open(directory)
        what = f"{directory} holds the hidden states of another model, corpus or setting"
        check_same(what, stored.run, run, "Restore the former settings, or remove it.")
        return stored
    source, width = Reading(model, corpus, options), weight_of(model).shape[1]
    most, blocks = int(limit_bytes / bytes_per_position(width)), source.order.count
    if source.predictions > most:
        blocks = max(1, blocks * most // source.predictions)
    edges = (blocks * number // shard.count for number in (shard.number, shard.number + 1))

    def read(slot: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch, owned in source.passes(slot):
            z = states_of(model, batch, owned, bf16=options.bf16)
            states = z[owned.to(z.device)].bfloat16().cpu()
            yield states.view(torch.int16).numpy(), next_tokens(batch, owned, corpus).numpy()
            task.advance(len(states))

    total = min(source.predictions, most)
    with evaluating(model), progress.task("Reading hidden states", total, "tokens") as task:
        return _store(directory, run, width, map(read, range(*edges)))


def join_states(parts: list[HiddenStates], directory: Path) -> None:
    """Store the hidden states of all shards as one process would have."""
    run = {name: value for name, value in parts[0].run.items() if name != "shard"}
    blocks = (
        [(part.bits[start:end], part.following[start:end])]
        for part in parts
        for start, end in pairwise(part.ends)
    )
    _store(directory, run, parts[0].width, blocks)


def _store(
    directory: Path,
    run: dict[str, Any],
    width: int,
    blocks: Iterable[Iterable[tuple[np.ndarray, np.ndarray]]],
) -> HiddenStates:
    """Write states, as bits, and the tokens that follow them, in pieces of each block."""
    directory.mkdir(parents=True, exist_ok=True)
    ends = list[int]()
    with (
        room_to_write("hidden states", directory, "Make room or lower --states-gb."),
        atomic_file(directory / STATES_FILE) as states_file,
        atomic_file(directory / TOKENS_FILE) as tokens_file,
        array_file(states_file, np.dtype("<i2")) as add_states,
        array_file(tokens_file, np.dtype("<u4")) as add_tokens,
    ):
        count = 0
        for block in blocks:
            for bits, following in block:
                add_states(bits.reshape(-1))
                add_tokens(following)
                count += len(following)
            ends.append(count)
    note = {"format_version": FORMAT_VERSION, "run": run, "width": width, "ends": ends}
    write_json(directory / META_FILE, note)
    return HiddenStates.open(directory)


@dataclass(frozen=True)
class ScanInput(Reading):
    """A model, the corpus that it reads, its head, and its hidden states if stored."""

    head: PrototypeHead
    states: HiddenStates | None = None

    @property
    def cells(self) -> CellsMeta:
        """The format of the cells."""
        vocabulary, options = len(weight_of(self.model)), self.options
        sizes = self.head.width, vocabulary, self.corpus.num_tokens
        return cells_format(*sizes, options.codes, options.positions)


@dataclass
class Scan:
    """The results of a scan."""

    top: top_contexts.TopContexts
    uses: Tensor  # positions at which each prototype is active, int64 [K]
    seen: Tensor  # occurrences of each token, in all splits, int64 [V]
    following: Tensor  # how often each token is predicted, int64 [V]
    half_nearest: Tensor  # the nearest cosines after half of the blocks, −2 for none, [K]
    half_tokens: Tensor  # tokens predicted in half of the blocks, int64 []

    @classmethod
    def empty(cls, source: ScanInput) -> Scan:
        """Return an empty scan."""
        prototypes, vocabulary = source.head.num_prototypes, len(weight_of(source.model))
        uses, seen, following = (
            torch.zeros(size, dtype=torch.int64) for size in (prototypes, vocabulary, vocabulary)
        )
        top = top_contexts.empty(prototypes, source.options.contexts)
        half_nearest = torch.full((prototypes,), ABSENT)
        return cls(top, uses, seen, following, half_nearest, torch.tensor(0))

    @property
    def tokens(self) -> int:
        """How many tokens are predicted."""
        return int(self.following.sum())

    def merge(self, other: Scan) -> None:
        """Add the scan of another part; the order does not matter."""
        self.top = top_contexts.merge(self.top, other.top)
        self.half_nearest = torch.maximum(self.half_nearest, other.half_nearest)
        for name in ("uses", "seen", "following", "half_tokens"):
            getattr(self, name).add_(getattr(other, name))

    def convergence(self) -> list[dict[str, float]]:
        """Return the mean nearest cosine of the prototypes after half of the corpus and all."""
        points: list[dict[str, float]] = []
        half = int(self.half_tokens), self.half_nearest
        for tokens, nearest in (half, (self.tokens, self.top.cosine[:, 0])):
            present = nearest[nearest > ABSENT].double()
            if len(present):
                share, mean = tokens / max(self.tokens, 1), float(present.mean())
                points.append({"tokens": tokens, "share": share, "mean_nearest_cosine": mean})
        return points

    def save(self, directory: Path, positions: Run, cells: CellsMeta) -> None:
        """Write everything, with the counts of positions on disk and the format of their cells."""
        tensors = {name: value for name, value in vars(self).items() if name != "top"}
        tensors |= self.top._asdict() | {"counts": torch.from_numpy(positions.counts)}
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(tensors, directory / SCAN_FILE, metadata={"cells": json_text(asdict(cells))})

    @classmethod
    def load(cls, directory: Path, prototypes: slice, ranks: slice) -> Scan:
        """Read a saved scan, with some contexts of some prototypes."""
        columns = top_contexts.TopContexts._fields
        with safe_open(directory / SCAN_FILE, framework="pt") as file:
            top = (file.get_slice(name)[prototypes, ranks] for name in columns)
            others: Any = [file.get_tensor(field.name) for field in fields(cls)[1:]]
            return cls(top_contexts.TopContexts(*top), *others)


def scanned_positions(directory: Path) -> tuple[CellsMeta, Run]:
    """Return the format of cells and the positions of a finished part; FormatError if damaged."""
    try:
        with safe_open(directory / SCAN_FILE, framework="pt") as file:
            cells = CellsMeta(**json.loads(file.metadata()["cells"]))
            counts = file.get_tensor("counts").numpy()
    except (OSError, SafetensorError) as error:
        raise _damaged(directory, f"{SCAN_FILE}: {error}") from error
    dtype = spooled_type(cells)
    run = Run(directory / POSITIONS_FILE, dtype, counts)
    check_size(run.path, int(counts.sum()) * dtype.itemsize)
    return cells, run


def check_size(path: Path, expected: int) -> None:
    """Raise FormatError unless a file of a finished part, or of files from it, is as written."""
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise _damaged(path.parent, f"{path.name} has {size} bytes, expected {expected}")


def _damaged(directory: Path, why: str) -> FormatError:
    return FormatError(
        f"{directory} was damaged or removed since it was finished ({why}). Remove what is left of "
        "it, and give the same command again: only this part is made again."
    )


def read_block(
    source: ScanInput, slot: int, share: float
) -> Iterator[tuple[WindowBatch, Tensor, Tensor]]:
    """Yield a batch of windows, its positions that count and its states, for each forward pass.

    ``share`` of the windows of the ``slot``-th block are read. Positions are bool [B, T], states
    [B, T, d].
    """
    stored = None if source.states is None else source.states.of_block(slot)
    for batch, owned in source.passes(slot, share if stored is None else 1.0):
        if stored is None:
            z = states_of(source.model, batch, owned, bf16=source.options.bf16)
        else:
            states, stored = stored.tensor_split([int(owned.sum())])
            z = torch.zeros(*owned.shape, states.shape[1])
            z[owned] = states
            owned &= torch.from_numpy(drawn(batch.positions[:, 0].numpy(), share))[:, None]
        if owned.any():
            yield batch, owned, z.to(source.model.device)


def sample_states(source: ScanInput) -> np.ndarray:
    """Return the unit states of some 65,536 positions, float32 [n, d].

    They are those of windows drawn from blocks that are spread over the corpus, whatever its parts.
    """
    slots = range(min(source.order.count, SAMPLE_BLOCKS))
    share = SAMPLE * source.order.count / (max(1, source.predictions) * len(slots))
    parts = [np.empty((0, source.head.width), np.float32)]
    for slot in slots:
        for _, owned, z in read_block(source, slot, min(share, source.options.positions)):
            states = z[owned.to(z.device)].float()
            parts.append((states * inverse_norms(states)).cpu().numpy())
    sample = np.concatenate(parts)
    return sample if len(sample) else np.zeros((1, source.head.width), np.float32)


def scan_part(directory: Path, source: ScanInput, codes: Codes, progress: Reporter) -> None:
    """Scan the blocks of the part that the options name, and write its results and positions."""
    shard, scan = source.options.shard, Scan.empty(source)
    slots, dtype = source.order.slots(shard.number, shard.count), spooled_type(source.cells)
    expected = source.predictions * source.options.positions * len(slots) / source.order.count

    def read() -> Iterator[np.ndarray]:
        with progress.task("Indexing", round(expected), "tokens") as task:
            for records in scan_blocks(scan, source, slots, codes):
                yield records
                task.advance(len(records))

    run = write_run(directory / POSITIONS_FILE, read(), dtype, source.head.num_prototypes)
    scan.save(directory, run, source.cells)


def scan_blocks(scan: Scan, source: ScanInput, slots: range, codes: Codes) -> Iterator[np.ndarray]:
    """Scan some blocks, by their slots in the order; yield the records of each pass."""
    corpus, size = source.corpus, source.order.size
    for slot in slots:
        first = source.order.block(slot) * size
        tokens = corpus.tokens(first, min(size, corpus.num_tokens - first))
        scan.seen += torch.from_numpy(np.bincount(tokens, minlength=len(scan.seen)))
        for batch, owned, z in read_block(source, slot, source.options.positions):
            yield scan_pass(scan, source, batch, owned, z, codes)
        if 2 * slot < source.order.count:
            scan.half_tokens = scan.following.sum()
            scan.half_nearest = scan.top.cosine[:, 0].clamp_min(ABSENT)


@torch.inference_mode()
def scan_pass(
    scan: Scan, source: ScanInput, batch: WindowBatch, owned: Tensor, states: Tensor, codes: Codes
) -> np.ndarray:
    """Add contexts and counts of a pass; return records of its positions, for a spool.

    ``owned`` marks the N positions that count, bool [B, T], of ``states`` [B, T, d].
    """
    head, mask, z = source.head, owned.to(states.device), states.float()
    threshold = scan.top.threshold.to(z.device)
    best = scan_windows(z, head.prototypes, head.nearest_needed, mask, threshold)
    z_owned = z[mask]
    nearest = Nearest(best.indices, best.cosines, torch.relu(head.scale * best.cosines))
    used = head.chosen(z_owned, nearest)
    active = used.indices[used.activations > 0].cpu()
    scan.uses += active.bincount(minlength=len(scan.uses))
    # The row of each candidate among the owned positions.
    row = mask.flatten().cumsum(0)[best.window * z.shape[1] + best.offset] - 1
    routed = used.indices[row] == best.prototype[:, None]
    activation = torch.relu(head.scale * best.cosine)
    if head.weights == "fitted":
        activation = (used.activations[row] * routed).sum(1)
    window = best.window.cpu()
    candidates = top_contexts.Contexts(
        best.prototype.cpu(),
        best.cosine.cpu(),
        batch.positions[window, best.offset.cpu()],
        batch.document[window],
        activation.cpu(),
        routed.any(1).cpu(),
    )
    scan.top = top_contexts.update(scan.top, candidates)
    following = next_tokens(batch, owned, source.corpus)
    scan.following += following.bincount(minlength=len(scan.following))
    records = np.empty(len(following), spooled_type(source.cells))
    records["cell"] = best.indices[:, 0].cpu().numpy()
    records["token"], records["read"] = following, batch.input_ids[owned]
    records["position"] = batch.positions[owned].numpy()
    bf16, following = source.options.bf16, following.to(states.device)
    chances = probabilities(source.model, states[mask], following, bf16=bf16)
    records["probability"] = chances.cpu().numpy()
    codes.put((z_owned * inverse_norms(z_owned)).cpu().numpy(), records)
    return records


class WindowScan(NamedTuple):
    """The nearest prototypes of N owned positions, and M candidates for contexts."""

    indices: Int64[Tensor, "N k"]
    cosines: Float[Tensor, "N k"]
    window: Int64[Tensor, " M"]
    offset: Int64[Tensor, " M"]
    prototype: Int64[Tensor, " M"]
    cosine: Float[Tensor, " M"]


@torch.no_grad()
def scan_windows(
    z: Float[Tensor, "B T d"],
    prototypes: Float[Tensor, "K d"],
    k: int,
    owned: Bool[Tensor, "B T"],
    threshold: Float[Tensor, " K"],
) -> WindowScan:
    """Route owned positions, and find candidates for contexts, with one matrix product.

    A candidate of window b and prototype i is the owned t with the largest cos(z_bt, p_i), if that
    is at least threshold_i.
    """
    bank = (prototypes * inverse_norms(prototypes)).T.float()
    lowest = threshold.clamp_min(ABSENT / 2)
    windows = max(1, TILE_ELEMENTS // (z.shape[1] * bank.shape[1]))
    parts: list[WindowScan] = []
    for first in range(0, len(z), windows):
        states, mask = z[first : first + windows], owned[first : first + windows]
        scores = (states * inverse_norms(states)) @ bank
        cosines, indices = scores.topk(k)
        best, offset = scores.masked_fill_(~mask[:, :, None], ABSENT).max(1)
        pair = window, prototype = (best >= lowest).nonzero(as_tuple=True)
        candidates = window + first, offset[pair], prototype, best[pair]
        parts.append(WindowScan(indices[mask], cosines[mask], *candidates))
    return WindowScan(*map(torch.cat, zip(*parts, strict=True)))
