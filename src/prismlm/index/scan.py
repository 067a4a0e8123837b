"""Scanning blocks of a corpus: what has been found after any number of forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.corpus.windows import Block, BlockOrder, block_passes, read_block
from prismlm.index.codes import CodeName
from prismlm.index.mass import Key, MassCounter
from prismlm.index.positions import next_tokens, position_records, screening_weight
from prismlm.index.sort_cells import SORT_BYTES
from prismlm.index.spool import Spool
from prismlm.index.states import HiddenStates, pass_tokens, predicting, states_of
from prismlm.layers import PrototypeHead
from prismlm.ops import prototype_head, top_contexts
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch

# Points of the convergence curve for each tenfold of blocks.
POINTS_PER_DECADE = 8


def curve_slots(blocks: int) -> list[int]:
    """Return after how many blocks the nearest cosines are noted: evenly spaced logarithms."""
    steps = int(np.ceil(np.log10(max(blocks, 2)) * POINTS_PER_DECADE)) + 1
    grid = {round(10 ** (step / POINTS_PER_DECADE)) for step in range(steps)}
    return sorted({slot for slot in grid if slot < blocks} | {blocks})


@dataclass(frozen=True)
class IndexOptions:
    """How a corpus is read.

    Attributes:
        contexts: L, the places kept per prototype; one per document.
        window: tokens of a window; at most what the model can read.
        stride: tokens between windows. A token sees at least window − stride tokens before it, or
            its document's start.
        split: which documents to read.
        with_text: keep the text around each context, or offsets only.
        tokens_per_batch: predictions whose candidates are ranked together. It costs memory and
            saves time; the windows of a forward pass are fixed, and no result depends on it.
        positions: the share of all positions that goes to the cells; None writes none.
        sort_bytes: memory for sorting them.
        codes: of their hidden states: int8, or pq for a quarter of the size.
        verbatim: write what finds spans word for word, where its extra is installed.
        bf16: run the forward passes in bfloat16 (autocast).
    """

    contexts: int = 64
    window: int = 256
    stride: int = 128
    split: Split = "train"
    with_text: bool = True
    tokens_per_batch: int = 2**18
    positions: float | None = 1.0
    sort_bytes: int = SORT_BYTES
    codes: CodeName = "int8"
    verbatim: bool = True
    bf16: bool = False


@dataclass(frozen=True)
class ScanInput:
    """What is read and how.

    Attributes:
        model: the causal language model, in evaluation mode.
        head: its prototype head.
        corpus: the text.
        options: how it is read.
        states: what was read before and need not be again; None: the model reads all.
    """

    model: PreTrainedModel
    head: PrototypeHead
    corpus: Corpus
    options: IndexOptions
    states: HiddenStates | None = None

    @cached_property
    def order(self) -> BlockOrder:
        """In which the blocks of the corpus are read."""
        return BlockOrder.of(self.corpus.num_tokens)

    @cached_property
    def inverse(self) -> Tensor:
        """1/‖p‖ of every prototype, [K, 1]."""
        return inverse_norms(self.head.prototypes.detach())

    @cached_property
    def low(self) -> Tensor | None:
        """What likelihoods are screened with."""
        return screening_weight(self.model)

    def block(self, slot: int) -> Block:
        """Return the block that is read as the ``slot``-th."""
        how, number = self.options, self.order.block(slot)
        return read_block(self.corpus, self.order, number, how.split, how.window, how.stride)


@dataclass
class Scan:
    """What has been found in the blocks of one shard, a function of the passes done alone.

    Attributes:
        top: the best contexts.
        mass: uses and activations.
        curve_tokens: the tokens read when each point of the curve was passed, int64 [points].
        curve_nearest: each prototype's nearest cosine then, −2 before any, [points, K].
        slot: the block being read, as a number of the order.
        passes: how many forward passes of that block are done.
        tokens: predictions read.
        spool: where positions are written for the cells; None without cells.
        waiting: room for candidates that are not ranked yet.
        held: how many rows of it they take.
    """

    top: top_contexts.TopContexts
    mass: MassCounter
    curve_tokens: Tensor
    curve_nearest: Tensor
    slot: int = 0
    passes: int = 0
    tokens: int = 0
    spool: Spool | None = None
    waiting: top_contexts.Contexts | None = None
    held: int = 0

    @classmethod
    def empty(cls, given: ScanInput, slot: int = 0) -> Scan:
        """Return a scan that has read nothing yet and begins at a slot."""
        points, prototypes = len(curve_slots(given.order.count)), given.head.num_prototypes
        return cls(
            top_contexts.empty(prototypes, given.options.contexts, given.head.width),
            MassCounter(prototypes),
            torch.zeros(points, dtype=torch.int64),
            torch.full((points, prototypes), -2.0),
            slot,
        )

    def admit(self, candidates: top_contexts.Contexts) -> None:
        """Take candidates; many at a time are ranked, since that moves all that is kept.

        As many wait as there are places. Which do so changes no result. They wait in one place for
        the same reason as positions do: see :meth:`prismlm.index.spool.Spool.add`.
        """
        held = self.held + len(candidates.prototype)
        if self.waiting is None or held > len(self.waiting.prototype):
            room = [column.new_empty(2 * held, *column.shape[1:]) for column in candidates]
            for new, old in zip(room, self.waiting or (), strict=False):
                new[: self.held] = old[: self.held]
            self.waiting = top_contexts.Contexts(*room)
        for column, new in zip(self.waiting, candidates, strict=True):
            column[self.held : held] = new
        self.held = held
        if held > max(4096, self.top.cosine.numel()):
            self.settle()

    def settle(self) -> None:
        """Rank the candidates that wait."""
        if self.waiting is not None and self.held:
            waiting = (column[: self.held] for column in self.waiting)
            self.top = top_contexts.update(self.top, top_contexts.Contexts(*waiting))
            self.held = 0

    def finish_block(self, order: BlockOrder) -> None:
        """Go on to the next block; note the nearest cosines where the curve has a point."""
        self.slot, self.passes = self.slot + 1, 0
        slots = curve_slots(order.count)
        if self.slot in slots:
            self.settle()
            self._note(slots.index(self.slot))

    def finish_shard(self, order: BlockOrder) -> None:
        """Fill the points of the curve that lie beyond this shard."""
        self.settle()
        for point, slot in enumerate(curve_slots(order.count)):
            if slot > self.slot:
                self._note(point)

    def _note(self, point: int) -> None:
        self.curve_tokens[point] = self.tokens
        nearest = self.top.cosine[:, 0]
        self.curve_nearest[point] = torch.where(torch.isinf(nearest), -2.0, nearest)

    def merge(self, other: Scan) -> None:
        """Add a finished scan of other blocks; any order gives the same bits."""
        self.top = top_contexts.merge(self.top, other.top)
        self.mass.merge(other.mass.rows)
        self.curve_tokens += other.curve_tokens
        self.curve_nearest = torch.maximum(self.curve_nearest, other.curve_nearest)
        self.tokens += other.tokens


def scan_passes(scan: Scan, given: ScanInput, end: int) -> Iterator[int]:
    """Go on from where a scan is to the slot ``end``; yield each pass's predictions.

    Memory is set by K × L and one pass, not by the corpus. Between two yields the scan is whole.
    """
    while scan.slot < end:
        block = given.block(scan.slot)
        kept = None if given.states is None else given.states.of_block(scan.slot)
        size = pass_tokens(given.model.device)
        passes = block_passes(block, given.corpus, given.corpus.eos_token_id, size)
        for number, (batch, key) in enumerate(passes):
            # The end of a document predicts nothing of it.
            owned = predicting(batch, given.corpus)
            known = None
            if kept is not None:
                known, kept = kept.tensor_split([int(owned.sum())])
            if number < scan.passes:
                continue
            with torch.inference_mode():
                z = _states(given, batch, owned, known)
                keys = block.keys, torch.from_numpy(key)
                done = _scan_pass(scan, given, batch, owned.to(z.device), z, *keys)
            scan.passes += 1
            before, scan.tokens = scan.tokens, scan.tokens + done
            together = given.options.tokens_per_batch
            if before // together != scan.tokens // together:
                scan.settle()
            yield done
        scan.finish_block(given.order)


def _states(given: ScanInput, batch: WindowBatch, owned: Tensor, known: Tensor | None) -> Tensor:
    """Return the states of a pass, [B, T, d]: what is known of them, or read by the model."""
    model = given.model
    if known is not None:
        z = torch.zeros(*owned.shape, known.shape[1])
        z[owned] = known
        return z.to(model.device)
    return states_of(model, batch, owned, bf16=given.options.bf16)


def _scan_pass(
    scan: Scan,
    given: ScanInput,
    batch: WindowBatch,
    owned: Tensor,
    states: Tensor,
    keys: list[Key],
    key: Tensor,
) -> int:
    head, z = given.head, states.float()
    threshold = scan.top.threshold.to(z.device)
    found = prototype_head.scan_windows(z, head.prototypes, head.nearest_needed, owned, threshold)
    nearest = Nearest(found.indices, found.cosines, torch.relu(head.scale * found.cosines))
    own = z[owned]
    relied = head.chosen(own, nearest, given.inverse)
    share = given.options.positions
    if share is not None and scan.spool is not None:
        kept = owned.cpu()
        tokens = batch.input_ids[kept], next_tokens(batch, given.corpus)[kept]
        cell, positions = found.indices[:, 0], batch.positions[kept]
        z_owned, model = states[owned], given.model
        scan.spool.add(position_records(share, model, z_owned, cell, tokens, positions, given.low))
    window = owned.nonzero()[:, 0].cpu()
    scan.mass.add(keys, key[window], relied.indices.cpu(), relied.activations.cpu())
    rank = owned.flatten().cumsum(0)[found.window * z.shape[1] + found.offset] - 1
    here = relied.indices.index_select(0, rank) == found.prototype[:, None]
    activation = torch.relu(head.scale * found.cosine)
    if head.weights == "fitted":
        activation = (relied.activations.index_select(0, rank) * here).sum(1)
    scan.admit(
        top_contexts.Contexts(
            found.prototype.cpu(),
            found.cosine.cpu(),
            batch.positions[found.window.cpu(), found.offset.cpu()],
            batch.document[found.window.cpu()],
            activation.cpu(),
            here.any(1).cpu(),
            (own * inverse_norms(own)).bfloat16().index_select(0, rank).cpu(),
        )
    )
    return len(window)
