"""Options that several commands share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from prismlm.errors import InputError, check_choice, shown

if TYPE_CHECKING:
    from prismlm.corpus.chat import Messages
    from prismlm.explain.language_model import PrismLM
    from prismlm.index.lens import Lens as OpenedLens


def option(metavar: str, help: str, *names: str) -> Any:
    """Return an option that takes what its parameter is annotated as."""
    return typer.Option(*names, metavar=metavar, help=help)


def flag(name: str, help: str) -> Any:
    """Return an option that takes no value, or a pair of them: ``--yes/--no``."""
    return typer.Option(name, help=help)


def number(
    metavar: str, help: str, least: float | None = 0, most: float | None = None, **options: Any
) -> Any:
    """Return an option that takes a finite number within bounds; None is no bound."""

    def checked(parameter: typer.CallbackParam, value: float | None) -> float | None:
        small = value is not None and least is not None and value < least
        large = value is not None and most is not None and value > most
        if value is None or (math.isfinite(value) and not small and not large):
            return value
        bounds = (("at least", least), ("at most", most))
        span = " and ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)
        span = span if math.isfinite(value) else "a finite number"
        raise InputError(f"{parameter.opts[0]} is {value:g}: expected {span}.")

    return typer.Option(metavar=metavar, help=help, callback=checked, **options)


def choice(metavar: str, help: str, choices: Sequence[str], *names: str) -> Any:
    """Return an option that takes one of some words."""

    def checked(parameter: typer.CallbackParam, value: str | None) -> str | None:
        if value is not None:
            check_choice(parameter.opts[0], value, choices)
        return value

    return typer.Option(*names, metavar=metavar, help=help, callback=checked)


SHARES_BY = (
    "Shares by document, source, domain or license (default: domain, or source where all have one)."
)
BY = ("document", "source", "domain", "license")
METHODS = ("evidence", "source")
SPLITS = ("train", "heldout", "all")
Json = Annotated[bool, flag("--json", "Print one JSON document and nothing else.")]
DryRun = Annotated[bool, flag("--dry-run", "Only estimate time, memory and disk.")]
SkipBadRows = Annotated[
    bool,
    flag("--skip-bad-rows", "Leave out rows that cannot be used, and count them by reason."),
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model directory.")]
Models = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", help="Model directories, such as seeds.")
]
Device = Annotated[str, option("NAME", "Where the model runs: auto, cpu or cuda.")]
Precision = Annotated[
    str,
    choice("NAME", "Of the model's passes: auto, float32 or bf16.", ("auto", "float32", "bf16")),
]
Lens = Annotated[str | None, option("NAME|DIR", "The lens, where there are several.")]
MovedCorpus = Annotated[
    Path | None, option("DIR", "Where the lens's corpus is now, if it was moved.", "--corpus")
]
TEXT_KINDS = "txt, md, json, jsonl, csv, parquet"
TextFiles = Annotated[
    list[Path] | None,
    option("FILE", f"Texts to read; may be repeated: {TEXT_KINDS}.", "--file"),
]
Overwrite = Annotated[bool, flag("--overwrite", "Replace result files that exist.")]
By = Annotated[str | None, choice("COLUMN", SHARES_BY, BY)]
Method = Annotated[str, choice("METHOD", "evidence, or source: PRISM's A = Σ α μ.", METHODS)]
Split = Annotated[str, choice("SPLIT", "Documents to read: train, heldout or all.", SPLITS)]
Temperature = Annotated[float, number("T", "0 takes the top token.")]
SamplingSeed = Annotated[int, option("S", "Of the sampling.")]
Chat = Annotated[bool, flag("--chat", "Send the text as a user message through the chat template.")]
System = Annotated[str | None, option("WORDS", "System prompt (with --chat).")]
Page = Annotated[Path | None, option("FILE", "Write a self-contained page.")]
Where = Annotated[
    list[str] | None,
    option("COLUMN=VALUE", "Only text that matches, such as license=CC0; may be repeated."),
]
Window = Annotated[int | None, option("N", "Tokens read at once (default: all, up to 1,024).")]
Stride = Annotated[int | None, option("N", "Tokens between windows (default: 3/4 of one).")]


def parse_places(option: str, inner: str, given: list[str] | None) -> list[tuple[int, int]]:
    """Return what was given as ``LAYER:INNER``, such as 6:2.

    Raises:
        InputError: something else was given.
    """
    found: list[tuple[int, int]] = []
    for text in given or []:
        place = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
        if place is None:
            raise InputError(f"{option} is {shown(text)}: expected LAYER:{inner}, such as 1:14.")
        found.append((int(place[1]), int(place[2])))
    return found


def put(text: str, chat: bool, system: str | None) -> str | Messages:
    """Return what a model is asked: a text, or with ``--chat`` the messages of a question.

    Raises:
        InputError: words before a question, and none.
    """
    if system is not None and not chat:
        raise InputError("--system is a system prompt: add --chat, or leave it out.")
    from prismlm.corpus.chat import asked

    return asked(text, system) if chat else text


def model_first(default: str, help: str) -> typer.Typer:
    """Return a group that takes a first argument that is no command for ``default``'s MODEL."""

    class ModelFirst(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] != "--help":
                args = [default, *args]
            return super().parse_args(ctx, args)

    return typer.Typer(cls=ModelFirst, no_args_is_help=True, help=help)


def is_first_process() -> bool:
    """Say whether this is the process that speaks, of those that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"


def needs(*packages: str) -> None:
    """Raise ModuleNotFoundError, which names the extra, for a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def load_with_lens(model: Path, lens: str | None) -> tuple[PrismLM, OpenedLens]:
    """Open a model with its lens.

    Raises:
        InputError: as :func:`prismlm.load`, or it has none.
    """
    from prismlm.explain.language_model import load

    lm = load(model, lens=lens)
    return lm, lm.lens_for("table of its prototypes")
