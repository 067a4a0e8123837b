"""Groups whose first argument may be a model in place of a command."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


def model_first(default: str, help: str) -> typer.Typer:
    """Return a group that takes a first argument that is no command for ``default``'s MODEL."""

    class ModelFirst(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] != "--help":
                args = [default, *args]
            return super().parse_args(ctx, args)

    return typer.Typer(cls=ModelFirst, no_args_is_help=True, help=help)
