"""The forward passes of an index: contexts, uses and positions in one part of a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.corpus.windows import BlockOrder, split_counts
from prismlm.errors import FormatError
from prismlm.files import json_text
from prismlm.layers import PrototypeHead
from prismlm.lens.cell_files import Run, Spool, cells_format, spooled_type
from prismlm.lens.cells import CellsMeta
from prismlm.lens.codes import SAMPLE, Codes, open_codes
from prismlm.lens.options import IndexOptions
from prismlm.lens.states import (
    HiddenStates,
    drawn,
    next_tokens,
    passes,
    probabilities,
    states_of,
)
from prismlm.models.sidecar import weight_of
from prismlm.ops import top_contexts
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus
    from prismlm.corpus.windows import WindowBatch

# Cosines computed at once: 64 MiB, except for a single window that has more.
TILE_ELEMENTS = 2**24
# The cosine of a missing position.
ABSENT = -2.0
SCAN_FILE, POSITIONS_FILE = "scan.safetensors", "positions"
# Blocks, spread over the corpus, that the centers of product quantisation are learned from.
SAMPLE_BLOCKS = 512
# Fields of a scan.
SUMS = ("uses", "half_nearest", "seen", "following")


@dataclass(frozen=True)
class ScanInput:
    """A model in evaluation mode, the corpus it reads, and its hidden states if stored."""

    model: PreTrainedModel
    head: PrototypeHead
    corpus: Corpus
    options: IndexOptions
    states: HiddenStates | None = None

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
    half_nearest: Tensor  # the nearest cosines after half of the blocks, −2 for none, [K]
    seen: Tensor  # occurrences of each token, in all splits, int64 [V]
    following: Tensor  # how often each token is predicted, int64 [V]
    tokens: int = 0
    half_tokens: int = 0  # those of half of the blocks

    @classmethod
    def empty(cls, source: ScanInput) -> Scan:
        """Return an empty scan."""
        prototypes, vocabulary = source.head.num_prototypes, len(weight_of(source.model))
        return cls(
            top_contexts.empty(prototypes, source.options.contexts),
            torch.zeros(prototypes, dtype=torch.int64),
            torch.full((prototypes,), ABSENT),
            torch.zeros(vocabulary, dtype=torch.int64),
            torch.zeros(vocabulary, dtype=torch.int64),
        )

    def record_half(self) -> None:
        """Record the nearest cosines after the first half of the blocks."""
        self.half_tokens = self.tokens
        self.half_nearest = self.top.cosine[:, 0].clamp_min(ABSENT)

    def merge(self, other: Scan) -> None:
        """Add the scan of another part; the order does not matter."""
        self.top = top_contexts.merge(self.top, other.top)
        self.uses += other.uses
        self.half_nearest = torch.maximum(self.half_nearest, other.half_nearest)
        self.seen += other.seen
        self.following += other.following
        self.tokens += other.tokens
        self.half_tokens += other.half_tokens

    def convergence(self) -> list[dict[str, float]]:
        """Return the mean nearest cosine of the prototypes after half of the corpus and all."""
        points: list[dict[str, float]] = []
        halves = (self.half_tokens, self.half_nearest), (self.tokens, self.top.cosine[:, 0])
        for tokens, nearest in halves:
            present = nearest[nearest > ABSENT].double()
            if len(present):
                share, mean = tokens / max(self.tokens, 1), float(present.mean())
                points.append({"tokens": tokens, "share": share, "mean_nearest_cosine": mean})
        return points

    def save(self, directory: Path, positions: Run, cells: CellsMeta) -> None:
        """Write everything, with the counts of positions on disk and the format of their cells."""
        noted = {"tokens": self.tokens, "half_tokens": self.half_tokens, "cells": asdict(cells)}
        tensors = {name: getattr(self, name).clone() for name in SUMS} | self.top._asdict()
        tensors["counts"] = torch.from_numpy(positions.counts)
        save_file(tensors, str(directory / SCAN_FILE), metadata={"noted": json_text(noted)})

    @classmethod
    def load(cls, directory: Path, prototypes: slice, ranks: slice) -> Scan:
        """Read a saved scan, with some contexts of some prototypes; FormatError if damaged."""
        with _scan_file(directory) as (file, noted):
            fields = top_contexts.TopContexts._fields
            top = top_contexts.TopContexts(*(file.get_slice(f)[prototypes, ranks] for f in fields))
            sums: dict[str, Any] = {name: file.get_tensor(name) for name in SUMS}
            counts = {name: noted[name] for name in ("tokens", "half_tokens")}
            return cls(top=top, **sums, **counts)


def scanned_positions(directory: Path, centres: Path) -> tuple[CellsMeta, Run]:
    """Return the format of the cells and the positions of a finished part.

    Raises:
        FormatError: the part was damaged or removed since it was finished.
    """
    with _scan_file(directory) as (file, noted):
        cells, counts = CellsMeta(**noted["cells"]), file.get_tensor("counts").numpy()
    codes = open_codes(centres, cells.codes, cells.width)
    run = Run(directory / POSITIONS_FILE, spooled_type(codes, cells), counts)
    size = run.path.stat().st_size if run.path.is_file() else 0
    expected = int(counts.sum()) * run.dtype.itemsize
    if size != expected:
        raise _damaged(directory, f"{run.path.name} has {size} bytes, expected {expected}")
    return cells, run


@contextmanager
def _scan_file(directory: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    try:
        with safe_open(str(directory / SCAN_FILE), framework="pt") as file:
            yield file, json.loads(file.metadata()["noted"])
    except (OSError, SafetensorError) as error:
        raise _damaged(directory, str(error)) from error


def _damaged(directory: Path, why: str) -> FormatError:
    return FormatError(
        f"the part {directory} was damaged or removed since it was finished ({why}). Remove what "
        "is left of it, and give the same command again: only this part is read again."
    )


def read_block(
    source: ScanInput, slot: int, share: float
) -> Iterator[tuple[WindowBatch, Tensor, Tensor]]:
    """Yield a batch of windows, its positions that count and its states, for each forward pass.

    ``share`` of the windows of the ``slot``-th block are read. Positions are bool [B, T], states
    [B, T, d].
    """
    model, options = source.model, source.options
    stored = None if source.states is None else source.states.of_block(slot)
    read = share if stored is None else 1.0
    for batch, owned in passes(model, source.corpus, source.order, slot, options, read):
        if stored is None:
            with torch.inference_mode():
                z = states_of(model, batch, owned, bf16=options.bf16)
        else:
            states, stored = stored.tensor_split([int(owned.sum())])
            z = torch.zeros(*owned.shape, states.shape[1])
            z[owned] = states
            owned &= torch.from_numpy(drawn(batch.positions[:, 0].numpy(), share))[:, None]
        if owned.any():
            yield batch, owned, z.to(model.device)


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


def scan_blocks(
    scan: Scan, source: ScanInput, slots: range, spool: Spool, codes: Codes
) -> Iterator[int]:
    """Scan some blocks, by their slots in the order; yield the predictions of each pass."""
    corpus, size, half = source.corpus, source.order.size, -(-source.order.count // 2)
    for slot in slots:
        if slot == half:
            scan.record_half()
        first = source.order.block(slot) * size
        tokens = corpus.tokens(first, min(size, corpus.num_tokens - first))
        scan.seen += torch.from_numpy(np.bincount(tokens, minlength=len(scan.seen)))
        for batch, owned, z in read_block(source, slot, source.options.positions):
            with torch.inference_mode():
                unit, cell = scan_pass(scan, source, batch, owned, z)
                records = records_of(source, batch, owned, z, unit, cell, codes)
            spool.add(records)
            counts = np.bincount(records["token"], minlength=len(scan.following))
            scan.following += torch.from_numpy(counts)
            scan.tokens += len(unit)
            yield len(unit)
    if slots.stop <= half:
        scan.record_half()


def scan_pass(
    scan: Scan, source: ScanInput, batch: WindowBatch, owned: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Add contexts and uses of a pass; return unit states [N, d] and nearest prototypes [N].

    ``owned`` marks the N positions that count, bool [B, T], of ``states`` [B, T, d].
    """
    head, mask = source.head, owned.to(states.device)
    z = states.float()
    best = scan_windows(
        z, head.prototypes, head.nearest_needed, mask, scan.top.threshold.to(z.device)
    )
    z_owned = z[mask]
    unit = z_owned * inverse_norms(z_owned)
    used = head.chosen(
        z_owned, Nearest(best.indices, best.cosines, torch.relu(head.scale * best.cosines))
    )
    active = used.indices[used.activations > 0].cpu()
    scan.uses += active.bincount(minlength=len(scan.uses))
    # The row of each candidate among the owned positions.
    row = mask.flatten().cumsum(0)[best.window * z.shape[1] + best.offset] - 1
    routed = used.indices[row] == best.prototype[:, None]
    activation = torch.relu(head.scale * best.cosine)
    if head.weights == "fitted":
        activation = (used.activations[row] * routed).sum(1)
    candidates = top_contexts.Contexts(
        best.prototype.cpu(),
        best.cosine.cpu(),
        batch.positions[best.window.cpu(), best.offset.cpu()],
        batch.document[best.window.cpu()],
        activation.cpu(),
        routed.any(1).cpu(),
    )
    scan.top = top_contexts.update(scan.top, candidates)
    return unit, best.indices[:, 0]


def records_of(
    source: ScanInput,
    batch: WindowBatch,
    owned: Tensor,
    states: Tensor,
    unit: Tensor,
    cell: Tensor,
    codes: Codes,
) -> np.ndarray:
    """Return the records of the N positions of a pass, with their cells, for a spool."""
    following = next_tokens(batch, owned, source.corpus)
    records = np.empty(len(unit), spooled_type(codes, source.cells))
    records["cell"] = cell.cpu().numpy()
    records["token"], records["read"] = following, batch.input_ids[owned]
    records["position"] = batch.positions[owned].numpy()
    z, following = states[owned.to(states.device)], following.to(states.device)
    chance = probabilities(source.model, z, following, bf16=source.options.bf16)
    records["probability"] = chance.cpu().numpy()
    codes.put(unit.cpu().numpy(), records)
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
    threshold: Float[Tensor, " K"] | None = None,
) -> WindowScan:
    """Route owned positions, and find candidates for contexts, with one matrix product.

    A candidate of window b and prototype i is the owned t with the largest cos(z_bt, p_i), if that
    is at least threshold_i (None: always).
    """
    bank = (prototypes * inverse_norms(prototypes)).T.float()
    lowest = bank.new_full((bank.shape[1],), ABSENT / 2)
    lowest = lowest if threshold is None else torch.maximum(threshold, lowest)
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
