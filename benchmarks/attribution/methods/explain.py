"""What ``explain`` itself does: the cells of a lens on disk, in place of positions in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.attribution.judges.passages import Prediction
from benchmarks.attribution.methods.setting import ROWS_AT_ONCE, Setting
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.positions import TEMPERATURE, supports
from prismlm.index.cells import Cells
from prismlm.index.sort_cells import write_cells
from prismlm.index.spool import Spool, quantise
from prismlm.layers import PrototypeHead
from prismlm.progress import SILENT


class Explained:
    """Evidence by position as the product spreads it.

    Args:
        setting: whose model is asked, and whose passages are scored.
        cells: of a lens of the same model and documents.
        temperature: T.
        shuffled: a seed makes it a control: every prototype is given another one's cell.
    """

    def __init__(
        self,
        setting: Setting,
        cells: Cells,
        temperature: float = TEMPERATURE,
        *,
        shuffled: int | None = None,
    ) -> None:
        self.setting, self.cells, self.temperature = setting, cells, temperature
        self.order = torch.arange(setting.head.num_prototypes)
        if shuffled is not None:
            generator = torch.Generator().manual_seed(shuffled)
            self.order = torch.randperm(len(self.order), generator=generator)

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        asked, bank = self.setting.ask(predictions), self.setting.bank
        nothing = torch.zeros(len(predictions))
        table = EvidenceTable(
            self.order[torch.from_numpy(asked.prototypes)],
            torch.from_numpy(asked.evidence),
            nothing,
            nothing,
            torch.from_numpy(asked.states),
            torch.from_numpy(asked.targets),
        )
        found = supports(table, self.cells, self.temperature)
        passage = bank.passage_at(found.place)
        inside = passage >= 0
        flat = found.prediction[inside] * len(bank) + passage[inside]
        total = np.bincount(flat, found.weight[inside], minlength=len(predictions) * len(bank))
        return total.reshape(len(predictions), len(bank)).astype(np.float32)


def written_cells(setting: Setting, directory: Path) -> Cells:
    """Write the positions of a setting as a lens has them; the place is their passage's first."""
    positions = setting.positions
    spool = Spool(directory / "positions", setting.head.width)
    for first in range(0, len(positions), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        records = np.empty(len(positions.token[rows]), spool.dtype)
        records["cell"], records["token"] = positions.cell[rows], positions.token[rows]
        records["position"] = setting.bank.first[positions.passage[rows]]
        records["probability"] = positions.probability[rows]
        records["scale"], records["code"] = quantise(positions.state[rows].astype(np.float32))
        spool.add(records)
        spool.flush()
    vocabulary = setting.model.config.vocab_size
    kept = write_cells(directory, [spool], setting.head.num_prototypes, vocabulary, 1.0, SILENT)
    return Cells(directory, kept)


@torch.no_grad()
def with_random_states(setting: Setting, seed: int) -> Setting:
    """Return the control: as many random training states in the place of the prototypes."""
    positions, trained = setting.positions, setting.head
    chosen = np.random.default_rng(seed).permutation(len(positions))[: trained.num_prototypes]
    states = positions.state[chosen].astype(np.float32) * positions.size[chosen, None]
    head = PrototypeHead(trained.width, trained.num_prototypes, trained.prototypes_per_token)
    head.place_on(torch.from_numpy(states))
    head.eval().requires_grad_(False)
    cell = np.empty(len(positions), dtype=np.int32)
    for first in range(0, len(positions), ROWS_AT_ONCE):
        part = torch.from_numpy(positions.state[first : first + ROWS_AT_ONCE].astype(np.float32))
        cell[first : first + ROWS_AT_ONCE] = head.nearest(part).indices[:, 0].numpy()
    return replace(setting, head=head, positions=replace(positions, cell=cell))
