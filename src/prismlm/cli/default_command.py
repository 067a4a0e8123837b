"""Groups whose first argument may be a model in place of a command."""

from __future__ import annotations

from typing import Any, ClassVar

from typer.core import TyperGroup


class ModelFirst(TyperGroup):
    """Takes a first argument that is no command for the MODEL of its default command."""

    default: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command before a model."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [self.default, *args]
        return super().parse_args(ctx, args)
