"""Opening a model for a command: its own messages, and nobody else's progress bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prismlm.lens.language_model import PrismLM


def quiet_transformers() -> None:
    """Keep transformers' bars and advice off the terminal; errors still come through."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def open_model(path: Path, lens: str | None) -> PrismLM:
    """Open a model directory and its lens; the errors are those of ``prismlm.load``."""
    from prismlm.lens.language_model import load

    quiet_transformers()
    return load(path, lens=lens)
