"""An OpenAI-compatible server whose answers carry the training text behind them."""

from __future__ import annotations

from prismlm.web.server import create_app

__all__ = ["create_app"]
