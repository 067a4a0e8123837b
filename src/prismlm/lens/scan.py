"""The forward passes of an index: contexts, uses and positions found in the blocks of one part."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int64
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from prismlm.corpus.windows import BlockOrder
from prismlm.files import json_text
from prismlm.layers import PrototypeHead
from prismlm.lens.codes import quantise
from prismlm.lens.layout import GROUP_COLUMNS, MASS_SCHEMA, OTHER
from prismlm.lens.options import IndexOptions
from prismlm.lens.states import (
    HiddenStates,
    next_tokens,
    passes,
    probabilities,
    states_of,
)
from prismlm.lens.write_cells import DOCUMENTS_AT_ONCE, Spool, drawn, record_type
from prismlm.ops import top_contexts
from prismlm.ops.prototype_head import Nearest
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.corpus.store import Corpus, Split
    from prismlm.corpus.windows import WindowBatch

# Points of the convergence curve for each tenfold of blocks.
POINTS_PER_DECADE = 8
# Activations are summed as whole multiples of 2⁻²⁰, so that no order of addition changes a bit.
STEPS_PER_UNIT = 2**20
# How many (source, domain, licence) have rows of their own: at K = 2,048, 64 MiB.
MAX_GROUPS = 2048
# Cosines formed at once: 64 MiB, but for a single window that has more.
TILE_ELEMENTS = 2**24
# Stands for the cosine where there is no position.
ABSENT = -2.0
SCAN_FILE, POSITIONS_FILE = "scan.safetensors", "positions"
Key = tuple[str | None, ...]


@dataclass(frozen=True)
class ScanInput:
    """What is read and how.

    The model is in evaluation mode; ``states`` were read before and need not be again.
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
    def groups(self) -> Groups:
        """The sources, domains and licences that uses are counted by."""
        return groups_of(self.corpus, self.options.split)

    @cached_property
    def curve_slots(self) -> list[int]:
        """After how many blocks nearest cosines are noted: evenly spaced logarithms."""
        blocks = self.order.count
        steps = int(np.ceil(np.log10(max(blocks, 2)) * POINTS_PER_DECADE)) + 1
        grid = {round(10 ** (step / POINTS_PER_DECADE)) for step in range(steps)}
        return sorted({slot for slot in grid if slot < blocks} | {blocks})


class Groups(NamedTuple):
    """The (source, domain, licence) with rows of their own, and the number of each document's."""

    keys: list[Key]
    of: Tensor


def groups_of(corpus: Corpus, split: Split) -> Groups:
    """Read which groups the documents of a split are of; see :func:`own_rows`."""
    numbering: dict[Key, int] = {}
    numbers, group = corpus.split(split), np.zeros(len(corpus), np.int64)
    for first in range(0, len(numbers), DOCUMENTS_AT_ONCE):
        part = numbers[first : first + DOCUMENTS_AT_ONCE]
        table = corpus.documents.take(part)
        columns = (table[name].to_pylist() for name in GROUP_COLUMNS)
        rows = zip(*columns, strict=True)
        group[part] = [numbering.setdefault(key, len(numbering)) for key in rows]
    tokens = np.bincount(group[numbers], corpus.lengths[numbers], minlength=len(numbering))
    owner = own_rows(list(numbering), tokens.tolist())
    keys = sorted(set(owner), key=_sort_key)
    number = {key: i for i, key in enumerate(keys)}
    own = np.array([number[key] for key in owner], np.int64)
    return Groups(keys, torch.from_numpy(own[group]))


def own_rows(keys: Sequence[Key], tokens: Sequence[float], limit: int = MAX_GROUPS) -> list[Key]:
    """Return as what each group is counted.

    The ``limit`` groups with the most tokens have rows of their own. The others are summed as
    source "(other)" of their domain and licence, and where even these are too many, as "(other)"
    in all three. Memory is thus set by K, whatever the corpus.
    """

    def largest(sizes: Counter[Key]) -> set[Key]:
        return set(sorted(sizes, key=lambda key: (-sizes[key], _sort_key(key)))[:limit])

    size = Counter(dict(zip(keys, map(int, tokens), strict=True)))
    own = largest(size)
    owners = [key if key in own else (OTHER, *key[1:]) for key in keys]
    others: Counter[Key] = Counter()
    for key, owner in zip(keys, owners, strict=True):
        if owner not in own:
            others[owner] += size[key]
    kept = own | largest(others)
    return [owner if owner in kept else (OTHER,) * len(GROUP_COLUMNS) for owner in owners]


def _sort_key(key: Key) -> list[tuple[bool, str]]:
    return [(part is not None, part or "") for part in key]


def count_uses(mass: Tensor, group: Tensor, used: Nearest) -> None:
    """Add to [2, groups, K] the uses of N positions, each of a group and k prototypes.

    Uses are counted, and their activations summed in steps; 0 or less is no use.
    """
    cell = (group[:, None] * mass.shape[2] + used.indices.cpu()).flatten()
    positive = used.activations.cpu().clamp_min(0).flatten()
    uses, steps = mass.view(2, -1)
    uses.index_add_(0, cell, (positive > 0).long())
    steps.index_add_(0, cell, (positive.double() * STEPS_PER_UNIT).round_().long())


def mass_table(mass: Tensor, keys: Sequence[Key]) -> pa.Table:
    """Return ``mass.parquet``: one row per (prototype, group) that occurs."""
    prototype, group = mass[0].T.nonzero().T.numpy()
    columns = [
        pa.array([key[i] for key in keys], pa.string()).take(pa.array(group))
        for i in range(len(GROUP_COLUMNS))
    ]
    uses, steps = (part[group, prototype].numpy() for part in mass)
    return pa.table(
        [pa.array(prototype.astype(np.int32)), *columns, uses, steps / STEPS_PER_UNIT],
        schema=MASS_SCHEMA,
    )


@dataclass
class Scan:
    """What has been found in the blocks of one part.

    Attributes:
        top: the best contexts.
        mass: uses, and activations in steps, of every group and prototype, int64 [2, groups, K].
        curve_tokens: the tokens read when each point of the curve was passed, int64 [points].
        curve_nearest: each prototype's nearest cosine then, −2 before any, [points, K].
        spool: where positions are written for the cells.
        tokens: predictions read.
    """

    top: top_contexts.TopContexts
    mass: Tensor
    curve_tokens: Tensor
    curve_nearest: Tensor
    spool: Spool
    tokens: int = 0

    @classmethod
    def empty(cls, given: ScanInput, directory: Path) -> Scan:
        """Return a scan that has read nothing yet and writes positions to a directory."""
        points, prototypes = len(given.curve_slots), given.head.num_prototypes
        return cls(
            top_contexts.empty(prototypes, given.options.contexts, given.head.width),
            torch.zeros(2, len(given.groups.keys), prototypes, dtype=torch.int64),
            torch.zeros(points, dtype=torch.int64),
            torch.full((points, prototypes), ABSENT),
            Spool(directory / POSITIONS_FILE, given.head.width),
        )

    def note(self, points: slice) -> None:
        """Note the nearest cosines at points of the curve."""
        self.curve_tokens[points] = self.tokens
        self.curve_nearest[points] = self.top.cosine[:, 0].clamp_min(ABSENT)

    def merge(self, other: Scan) -> None:
        """Add a finished scan of other blocks; any order gives the same bits."""
        self.top = top_contexts.merge(self.top, other.top)
        self.mass += other.mass
        self.curve_tokens += other.curve_tokens
        self.curve_nearest = torch.maximum(self.curve_nearest, other.curve_nearest)
        self.tokens += other.tokens

    def save(self, directory: Path) -> None:
        """Write what was found beside its positions."""
        self.spool.flush()
        tensors = {name: getattr(self, name) for name in ("mass", "curve_tokens", "curve_nearest")}
        noted = {"tokens": self.tokens, "runs": self.spool.runs}
        path = directory / SCAN_FILE
        save_file(tensors | self.top._asdict(), str(path), metadata={"noted": json_text(noted)})

    @classmethod
    def load(cls, directory: Path, width: int) -> Scan:
        """Read what :meth:`save` wrote."""
        with safe_open(str(directory / SCAN_FILE), framework="pt") as file:
            noted = json.loads(file.metadata()["noted"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        top = top_contexts.TopContexts(*map(tensors.pop, top_contexts.TopContexts._fields))
        spool = Spool(directory / POSITIONS_FILE, width, noted["runs"])
        return cls(top, **tensors, spool=spool, tokens=noted["tokens"])


def scan_blocks(scan: Scan, given: ScanInput, slots: range) -> Iterator[int]:
    """Scan the blocks of some slots of the order; yield each pass's predictions.

    Memory is set by K × L and one pass, not by the corpus.
    """
    points, model, how = given.curve_slots, given.model, given.options
    for slot in slots:
        kept = None if given.states is None else given.states.of_block(slot)
        for batch, owned in passes(model, given.corpus, given.order, slot, how):
            with torch.inference_mode():
                if kept is None:
                    z = states_of(model, batch, owned, bf16=how.bf16)
                else:
                    known, kept = kept.tensor_split([int(owned.sum())])
                    z = torch.zeros(*owned.shape, known.shape[1])
                    z[owned] = known
                done = scan_pass(scan, given, batch, owned, z.to(model.device))
            scan.tokens += done
            yield done
        if slot + 1 in points:
            point = points.index(slot + 1)
            scan.note(slice(point, point + 1))
    # Points that lie beyond this part.
    scan.note(slice(sum(point <= slots.stop for point in points), None))


def scan_pass(
    scan: Scan, given: ScanInput, batch: WindowBatch, kept: Tensor, states: Tensor
) -> int:
    """Take what a pass has found: contexts, uses, positions; return its predictions.

    ``kept`` says which positions count, bool [B, T]; ``states`` are [B, T, d], on the model's
    device.
    """
    head, owned = given.head, kept.to(states.device)
    z = states.float()
    threshold = scan.top.threshold.to(z.device)
    found = scan_windows(z, head.prototypes, head.nearest_needed, owned, threshold)
    own = z[owned]
    unit = own * inverse_norms(own)
    nearest = Nearest(found.indices, found.cosines, torch.relu(head.scale * found.cosines))
    relied = head.chosen(own, nearest)
    scan.spool.add(_records(given, batch, kept, states[owned], found.indices[:, 0]))
    window = kept.nonzero()[:, 0]
    count_uses(scan.mass, given.groups.of[batch.document[window]], relied)
    rank = owned.flatten().cumsum(0)[found.window * z.shape[1] + found.offset] - 1
    here = relied.indices[rank] == found.prototype[:, None]
    activation = torch.relu(head.scale * found.cosine)
    if head.weights == "fitted":
        activation = (relied.activations[rank] * here).sum(1)
    candidates = top_contexts.Contexts(
        found.prototype.cpu(),
        found.cosine.cpu(),
        batch.positions[found.window.cpu(), found.offset.cpu()],
        batch.document[found.window.cpu()],
        activation.cpu(),
        here.any(1).cpu(),
        unit.bfloat16()[rank].cpu(),
    )
    scan.top = top_contexts.update(scan.top, candidates)
    return len(window)


def _records(
    given: ScanInput, batch: WindowBatch, kept: Tensor, z: Tensor, cell: Tensor
) -> np.ndarray:
    """Return the records of the share that is stored of N kept positions, with their states z."""
    positions = batch.positions[kept].numpy()
    chosen = torch.from_numpy(drawn(positions, given.options.positions))
    z, cell = (of[chosen.to(z.device)] for of in (z, cell))
    following = next_tokens(batch, given.corpus)[kept][chosen]
    records = np.empty(len(z), record_type(z.shape[1]))
    records["cell"] = cell.cpu().numpy()
    records["token"], records["read"] = following, batch.input_ids[kept][chosen]
    records["position"] = positions[chosen.numpy()]
    likely = probabilities(given.model, z, following.to(z.device), bf16=given.options.bf16)
    records["probability"] = likely.cpu().numpy()
    unit = z.float() * inverse_norms(z.float())
    records["scale"], records["code"] = quantise(unit.cpu().numpy())
    return records


class WindowScan(NamedTuple):
    """Routing of N owned positions in their order, and M positions that enter for a prototype."""

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
    """Route owned positions and find the best of each window that reach a prototype's threshold.

    What indexing needs from one product: for every window b and prototype i, the owned t with the
    largest cos(z_bt, p_i), where that is at least threshold_i (None: always).
    """
    bank = (prototypes * inverse_norms(prototypes)).T.float()
    lowest = bank.new_full((bank.shape[1],), ABSENT / 2)
    lowest = lowest if threshold is None else torch.maximum(threshold, lowest)
    windows = max(1, TILE_ELEMENTS // (z.shape[1] * bank.shape[1]))
    parts: list[WindowScan] = []
    for first in range(0, len(z), windows):
        states, own = z[first : first + windows], owned[first : first + windows]
        scores = (states * inverse_norms(states)) @ bank
        cosines, indices = scores.topk(k)
        best, offset = scores.masked_fill_(~own[:, :, None], ABSENT).max(1)
        at = (best >= lowest).nonzero(as_tuple=True)
        parts.append(
            WindowScan(indices[own], cosines[own], at[0] + first, offset[at], at[1], best[at])
        )
    return WindowScan(*map(torch.cat, zip(*parts, strict=True)))
