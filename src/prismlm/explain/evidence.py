"""The evidence of predictions: what each prototype in use says for the predicted token."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from prismlm.errors import InputError, check_choice
from prismlm.explain.shares import METHODS, Method


class Uses(NamedTuple):
    """The uses of prototypes that count, in the order of positions; [u] each.

    Attributes:
        position, prototype: int64.
        weight: positive evidence, or α; float64.
    """

    position: np.ndarray
    prototype: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True)
class EvidenceTable:
    """The evidence of T positions, k prototypes each.

    Attributes:
        indices: prototypes, int64 [T, k].
        evidence: their evidence for the target, float32 [T, k]; zero where not used.
        residual, bias: evidence of residual and bias, float32 [T].
        states: unit hidden states, float32 [T, d].
        read: the last token that each state has read, int64 [T].
        targets: the predicted tokens, int64 [T].
        activations: α, float32 [T, k]; needed by ``method="source"`` and by what speaks against.
        within: the table of the whole text that these are of, and their rows in it.
        kept: what was computed of the whole table.
    """

    indices: Tensor
    evidence: Tensor
    residual: Tensor
    bias: Tensor
    states: Tensor
    read: Tensor
    targets: Tensor
    activations: Tensor | None = None
    within: tuple[EvidenceTable, np.ndarray] | None = field(
        default=None, repr=False, compare=False, kw_only=True
    )
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getitem__(self, positions: slice) -> EvidenceTable:
        """Return some of the positions, which keep what stands before them in their text."""
        whole, rows = self.within or (self, np.arange(len(self.states)))
        return replace(self.apart(positions), within=(whole, rows[positions]))

    def apart(self, positions: slice) -> EvidenceTable:
        """Return some of the positions as a text of their own."""
        names = [one.name for one in fields(self) if one.init and one.name != "within"]
        columns: list[Any] = [getattr(self, name) for name in names]
        some: list[Any] = [None if one is None else one[positions] for one in columns]
        return EvidenceTable(*some)

    def uses(self, method: Method) -> Uses:
        """Return every use that counts."""
        check_choice("the method", method, METHODS)
        weights = self.activations if method == "source" else self.positive
        if weights is None:
            raise InputError("method 'source' needs an evidence table with activations.")
        position, slot = (weights > 0).nonzero(as_tuple=True)
        prototype = self.indices[position, slot].numpy()
        return Uses(position.numpy(), prototype, weights[position, slot].double().numpy())

    @property
    def positive(self) -> Tensor:
        """Positive evidence of prototypes, [T, k]; negative evidence is never netted."""
        return self.evidence.clamp_min(0)

    @cached_property
    def beside(self) -> np.ndarray:
        """Positive evidence of residual and bias, which no training text stands behind: [T]."""
        return (self.residual.double().clamp_min(0) + self.bias.double().clamp_min(0)).numpy()
