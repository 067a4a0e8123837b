"""Opening a model for a command: its own messages, and nobody else's progress bars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prismlm.lens.language_model import Checkpoint, PrismLM


def open_model(path: Path, lens: str | None) -> PrismLM:
    """Open a model directory and its lens; the errors are those of ``prismlm.load``."""
    from prismlm.lens.language_model import load

    _quiet_transformers()
    return load(path, lens=lens)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a model directory without its lenses, which may be stale."""
    from prismlm.lens.language_model import load_checkpoint

    _quiet_transformers()
    return load_checkpoint(path)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
