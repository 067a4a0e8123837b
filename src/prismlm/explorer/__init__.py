"""The explorer: a model, its prototypes and its training text in a browser."""

from __future__ import annotations

from prismlm.explorer.app import create_app

__all__ = ["create_app"]
