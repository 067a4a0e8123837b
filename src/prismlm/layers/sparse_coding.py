"""Unrolled sparse coding in place of an MLP."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from prismlm.errors import InputError
from prismlm.ops.sparse_coding import check_settings, sparse_code


class SparseCodingOutput(NamedTuple):
    """What the layer gives.

    Attributes:
        output: D a, or the code itself in the complete form.
        code: a ≥ 0; in the complete form m is d.
    """

    output: Float[Tensor, "*batch d"]
    code: Float[Tensor, "*batch m"]


class SparseCoding(nn.Module):
    """A finite number of steps towards a sparse code of z in a learned dictionary.

        overcomplete:   a_0 = 0,   a_{s+1} = ReLU(a_s + η (Dᵀ(z − D a_s) − θ)),   output D a_S
        complete:       a_0 = z,   the same steps,                                output a_S

    Overcomplete, D is [d, m] and the output, a combination of few atoms, is to be added to the
    stream. Complete, D is [d, d] and the output replaces the stream, which is then a sparse code
    itself; one step is CRATE's ISTA block. The dictionary is all there is to learn: d·m parameters,
    half of an MLP's, or d². A point costs 2S products with D overcomplete (an MLP costs 2) and 2S
    with the smaller D complete.

    η and θ are settings. Atoms start normal with standard deviation 1/√d, so of length 1 nearly,
    and ‖D‖₂² near (1 + √(m/d))², 9 at m = 4d: with η = 0.1 the steps descend on the LASSO there.
    Training may raise ‖D‖₂ above that; :func:`prismlm.ops.sparse_coding.largest_step` tells.

    Source: Prism, §4 (future work); Yu et al., White-Box Transformers via Sparse Rate Reduction
    (JMLR 2024), for the complete form; Yang et al., Scaling White-Box Transformers for Vision
    (NeurIPS 2024), for the overcomplete one with its two steps.

    Args:
        width: d.
        atoms: m; None for the complete form.
        steps: S.
        step_size: η.
        threshold: θ.

    Raises:
        InputError: no atoms, no steps, η that is not positive, or θ below 0.
    """

    def __init__(
        self,
        width: int,
        atoms: int | None = None,
        *,
        steps: int = 1,
        step_size: float = 0.1,
        threshold: float = 0.1,
    ) -> None:
        super().__init__()
        check_settings(step_size, threshold, steps)
        if atoms is not None and atoms < 1:
            raise InputError(f"a dictionary of {atoms} atoms: expected at least 1.")
        self.complete = atoms is None
        self.steps = steps
        self.step_size = step_size
        self.threshold = threshold
        self.dictionary = nn.Parameter(torch.empty(width, width if atoms is None else atoms))
        self.reset_parameters()

    @property
    def initial_deviation(self) -> float:
        """Standard deviation 1/√d of the dictionary's entries at the start."""
        return self.dictionary.shape[0] ** -0.5

    @property
    def multiplications(self) -> int:
        """Entries of matrices that one position is multiplied with: 2S d·m, or 2S d² complete."""
        return 2 * self.steps * self.dictionary.numel()

    def kept_bytes(self, size: int) -> int:
        """Return what the backward pass reads of one position, in bytes.

        Of each step what it codes, d, and a code, m = d in the complete form. There the last code
        is the stream, and the codes before it stand in float32 beside those that were multiplied.

        Args:
            size: bytes of a number in the products of matrices.
        """
        width, atoms = self.dictionary.shape
        beside = 4 * width * (self.steps - 1) if self.complete and size < 4 else 0
        return self.steps * size * (width + atoms) + beside

    def reset_parameters(self) -> None:
        """Draw the dictionary."""
        nn.init.normal_(self.dictionary, std=self.initial_deviation)

    def forward(self, z: Float[Tensor, "*batch d"]) -> SparseCodingOutput:
        """Code each position.

        Args:
            z: the stream, normalised.
        """
        code = sparse_code(
            z,
            self.dictionary,
            step=self.step_size,
            threshold=self.threshold,
            steps=self.steps,
            start=z if self.complete else None,
        )
        return SparseCodingOutput(code if self.complete else F.linear(code, self.dictionary), code)
