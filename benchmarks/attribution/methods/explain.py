"""What ``explain`` itself does: the cells of a lens on disk, in place of positions in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.attribution.methods.setting import Setting
from prismlm.eval.passages import Prediction
from prismlm.explain.evidence import EvidenceTable
from prismlm.explain.positions import supports
from prismlm.index.cells import Cells


class Explained:
    """Evidence by position as the product spreads it.

    Args:
        setting: whose model is asked, and whose passages are scored.
        cells: of a lens of the same model and documents.
    """

    def __init__(self, setting: Setting, cells: Cells) -> None:
        self.setting, self.cells = setting, cells

    def __call__(self, predictions: Sequence[Prediction]) -> np.ndarray:
        """Return the scores, float32 [predictions, passages]."""
        asked, bank = self.setting.ask(predictions), self.setting.bank
        nothing = torch.zeros(len(predictions))
        table = EvidenceTable(
            torch.from_numpy(asked.prototypes),
            torch.from_numpy(asked.evidence),
            nothing,
            nothing,
            torch.from_numpy(asked.states),
            torch.from_numpy(asked.targets),
        )
        found = supports(table, self.cells)
        passage = bank.passage_at(found.place)
        inside = passage >= 0
        flat = found.prediction[inside] * len(bank) + passage[inside]
        total = np.bincount(flat, found.weight[inside], minlength=len(predictions) * len(bank))
        return total.reshape(len(predictions), len(bank)).astype(np.float32)
