"""lm-eval's own command line over prismlm's decoders and uncertainty feedback."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.models.huggingface import HFLM

# Importing them makes the Auto classes know prismlm's model types.
from prismlm.models.uncertainty_feedback import load_uncertainty
from prismlm.models.uncertainty_table import has_uncertainty

# A decorator of lm-eval hides its type.
HuggingFaceLM: Any = HFLM


@contextmanager
def with_feedback() -> Iterator[None]:
    """Put saved uncertainty feedback beside every model that lm-eval loads during the block."""
    create = HuggingFaceLM._create_model

    def create_with_feedback(lm: Any, pretrained: str, **settings: Any) -> None:
        create(lm, pretrained=pretrained, **settings)
        if has_uncertainty(pretrained):
            load_uncertainty(pretrained, lm._model)

    HuggingFaceLM._create_model = create_with_feedback
    try:
        yield
    finally:
        HuggingFaceLM._create_model = create


def run_harness(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with these arguments."""
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        with with_feedback():
            cli_evaluate()
    finally:
        sys.argv = before
