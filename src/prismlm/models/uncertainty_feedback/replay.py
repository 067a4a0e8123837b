"""Reading again what a model read before, with the codes that it was fed then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prismlm.models.uncertainty_feedback.call import CODES
from prismlm.models.uncertainty_feedback.feedback import uncertainty_of
from prismlm.models.watch import Hook, watch


@contextmanager
def recording_codes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Keep the codes of this thread's calls in the block, each [B, T]; none without feedback."""
    codes: list[Tensor] = []

    def called(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        codes.append(output[CODES])

    with watch([] if uncertainty_of(model) is None else [Hook(model, after=called)]):
        yield codes


def replay(ids: Tensor, codes: Tensor | list[Tensor] | None) -> dict[str, Tensor]:
    """Return the arguments of a call that reads ``ids`` [B, T] as they were read before.

    As many of them as there are ``codes`` for: the last token of a generation was never read. All,
    and codes of their own, where none were recorded.
    """
    if isinstance(codes, list):
        codes = torch.cat(codes, 1) if codes else None
    if codes is None:
        return {"input_ids": ids}
    return {"input_ids": ids[:, : codes.shape[1]], CODES: codes[:, : ids.shape[1]]}
