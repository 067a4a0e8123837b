"""What ``explain`` itself does: the cells of a lens on disk, in place of positions in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.attribution.judges.passages import Prediction, answer_predictions
from benchmarks.attribution.methods.setting import ROWS_AT_ONCE, Setting, runs_of
from prismlm.corpus.layout import DOCUMENT_SCHEMA
from prismlm.explain.attribution import spread
from prismlm.explain.prediction import Parts, Predictions, Scores
from prismlm.layers import PrototypeHead
from prismlm.lens.cell_files import CellFiles, cells_format, spooled_type, write_run
from prismlm.lens.cells import SAMPLE, Cells, CodeName, Int8Codes, learn_codes
from prismlm.lens.layout import CELL_DOCUMENTS_FILE, GROUP_COLUMNS
from prismlm.ops.prototype_head import Nearest


class Explained:
    """Evidence by position as the product spreads it, each prediction within its text.

    As controls, a seed in ``shuffled`` gives every prototype another one's cell, and ``alone``
    explains every prediction as if no text stood before it.
    """

    def __init__(
        self,
        setting: Setting,
        cells: Cells,
        *,
        shuffled: int | None = None,
        alone: bool = False,
    ) -> None:
        self.setting, self.cells, self.alone = setting, cells, alone
        self.order, self.head = torch.arange(setting.head.num_prototypes), setting.head
        if shuffled is not None:
            generator = torch.Generator().manual_seed(shuffled)
            self.order = torch.randperm(len(self.order), generator=generator)
            self.head = deepcopy(setting.head)
            self.head.prototypes.data[self.order] = setting.head.prototypes.data

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        runs = runs_of(predictions, self.setting.window)
        return np.concatenate([self._scores(run) for run in runs])

    def _scores(self, run: Sequence[Prediction]) -> np.ndarray:
        """Return the scores of successive predictions of one text."""
        bank, count, asked = self.setting.bank, len(run), list(run)
        if not self.alone:
            ids = run[-1].ids[-self.setting.window :]
            asked = answer_predictions(ids[:1].tolist(), [*ids[1:].tolist(), run[-1].target])
        predictions = self._split(asked)
        alone = [slice(row, row + 1) for row in range(count)]
        texts = [predictions[rows] for rows in (alone if self.alone else [slice(None)])]
        found = [spread(one, self.cells, self.head) for one in texts]
        scores = np.zeros((len(asked), len(bank)), dtype=np.float32)
        for first, one in enumerate(found):
            passage = bank.passage_at(one.place)
            inside = passage >= 0
            np.add.at(scores, (first + one.prediction[inside], passage[inside]), one.weight[inside])
        return scores[-count:]

    def _split(self, predictions: Sequence[Prediction]) -> Predictions:
        """Return what the equation is about: prototypes, evidence, states and tokens."""
        asked, none = self.setting.ask(predictions), torch.zeros(len(predictions))
        evidence, states = map(torch.from_numpy, (asked.evidence, asked.states))
        read, targets = map(torch.from_numpy, (asked.read, asked.targets))
        prototypes = self.order[torch.from_numpy(asked.prototypes)]
        return Predictions(
            Nearest(prototypes, evidence, evidence),
            Parts(evidence, evidence, none, none, none, none),
            lambda: Scores(none, none, targets),
            *(read, targets, states),
        )


def temporary_cells(setting: Setting, codes: CodeName = "int8") -> Cells:
    """Return cells in a folder of their own that is gone; they are mapped, so they stay."""
    with tempfile.TemporaryDirectory() as directory:
        cells = written_cells(setting, Path(directory), codes)
        # What is opened when it is first asked for.
        assert len(cells.starts) == len(cells.lengths)
        assert all(cells.keys(column).names for column in GROUP_COLUMNS)
        return cells


def written_cells(setting: Setting, directory: Path, codes: CodeName = "int8") -> Cells:
    """Write the positions of a setting as a lens has them; the place is their passage's first."""
    positions, vocabulary = setting.positions, setting.model.config.vocab_size
    kept = cells_format(setting.head.width, vocabulary, setting.bank.corpus.num_tokens, codes)
    sample = np.linspace(0, len(positions) - 1, min(SAMPLE, len(positions))).astype(np.int64)
    states = positions.state[sample].astype(np.float32)
    int8 = codes == "int8"
    coder = Int8Codes() if int8 else learn_codes(directory, codes, states)
    dtype = spooled_type(kept)

    def read() -> Iterator[np.ndarray]:
        for first in range(0, len(positions), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            records = np.empty(len(positions.token[rows]), dtype)
            records["cell"], records["token"] = positions.cell[rows], positions.token[rows]
            records["read"] = positions.read[rows]
            records["position"] = setting.bank.first[positions.passage[rows]]
            records["probability"] = positions.probability[rows]
            coder.put(positions.state[rows].astype(np.float32), records)
            yield records

    bank = setting.bank
    ends = np.append(np.flatnonzero(np.diff(bank.document)), len(bank) - 1)
    starts = bank.corpus.starts[bank.documents]
    documents = bank.corpus.documents.take(bank.documents).select(DOCUMENT_SCHEMA.names)
    # Of a document whose beginning alone is kept, no more is there.
    lengths = pa.array((bank.first + bank.length)[ends] - starts)
    documents = documents.set_column(documents.schema.get_field_index("length"), "length", lengths)
    pq.write_table(documents, directory / CELL_DOCUMENTS_FILE)
    run = write_run(directory / "positions", read(), dtype, setting.head.num_prototypes)
    cells = CellFiles(kept, [run])
    for number in range(len(cells.ranges)):
        cells.write(directory, number)
    return Cells(directory, cells.entry())


@torch.no_grad()
def with_random_states(setting: Setting, seed: int) -> Setting:
    """Return the control: as many random training states in the place of the prototypes."""
    positions, trained = setting.positions, setting.head
    chosen = np.random.default_rng(seed).permutation(len(positions))[: trained.num_prototypes]
    states = positions.state[chosen].astype(np.float32) * positions.size[chosen, None]
    head = PrototypeHead(
        trained.width,
        trained.num_prototypes,
        trained.prototypes_per_token,
        weights=trained.weights,
    )
    head.place_on(torch.from_numpy(states))
    head.eval().requires_grad_(False)
    cell = np.empty(len(positions), dtype=np.int32)
    for first in range(0, len(positions), ROWS_AT_ONCE):
        part = torch.from_numpy(positions.state[first : first + ROWS_AT_ONCE].astype(np.float32))
        cell[first : first + ROWS_AT_ONCE] = head.nearest(part).indices[:, 0].numpy()
    return replace(setting, head=head, positions=replace(positions, cell=cell))
