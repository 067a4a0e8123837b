"""Options that several commands share, checks of their values, and how commands open a model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from prismlm.cli import output
from prismlm.errors import InputError
from prismlm.outputs import check_ending, check_outputs

if TYPE_CHECKING:
    from prismlm.corpus.chat import Messages
    from prismlm.explain.language_model import PrismLM
    from prismlm.lens.labels.endpoint import Endpoint as NamedEndpoint
    from prismlm.lens.lens import Lens as OpenedLens


def fill(kind: Any, options: Mapping[str, Any], **others: Any) -> Any:
    """Return a dataclass whose fields are the options of the same names, and some others."""
    names = {field.name for field in fields(kind)} & (options.keys() - others.keys())
    return kind(**{name: options[name] for name in names}, **others)


def option(
    metavar: str | None,
    help: str,
    *names: str,
    min: float | None = None,
    max: float | None = None,
) -> Any:
    """Return an option of the type of its parameter, within bounds."""
    bounds = {"min": min, "max": max, "callback": _check_finite}
    return typer.Option(*names, metavar=metavar, help=help, **bounds)


def argument(metavar: str, help: str) -> Any:
    """Return a positional argument."""
    return typer.Argument(metavar=metavar, help=help)


def flag(name: str, help: str) -> Any:
    """Return an option without a value, or a pair of them: ``--yes/--no``."""
    return typer.Option(name, help=help)


def _check_finite(parameter: typer.CallbackParam, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{parameter.opts[0]} is {value:g}: expected a finite number.")
    return value


TEXT_KINDS = "txt, md, json, jsonl, csv, parquet"
Json = Annotated[bool, flag("--json", "Print only JSON.")]
DryRun = Annotated[bool, flag("--dry-run", "Only estimate the cost.")]
SkipBadRows = Annotated[bool, flag("--skip-bad-rows", "Skip bad rows; count them by reason.")]
Overwrite = Annotated[bool, flag("--overwrite", "Replace existing output.")]
Model = Annotated[Path, argument("MODEL", "Directory, or org/name.")]
Models = Annotated[list[Path], argument("MODEL...", "Model directories, such as seeds.")]
Device = Annotated[str, option("NAME", "auto, cpu, cuda or balanced.")]
Engine = Annotated[Literal["local", "ray", "datatrove"], option(None, "What starts the workers.")]
Workers = Annotated[int | None, option("N", "Processes that make the parts.", min=1)]
PARTS_HELP = "Divide the work into parts (default: one per worker)."
PartCount = Annotated[int | None, option("N", PARTS_HELP, "--parts", min=1)]
Part = Annotated[str | None, option("I/N", "Make one of N parts.")]
Precision = Annotated[
    Literal["auto", "float32", "bf16"], option(None, "Precision of the forward passes.")
]
Lens = Annotated[str | None, option("NAME|DIR|URL", "Which lens.", "--lens")]
CorpusLocation = Annotated[Path | None, option("DIR", "The lens's corpus, if moved.", "--corpus")]
CorpusToRead = Annotated[Path | None, option("DIR", "Default: the training corpus.")]
TextFiles = Annotated[list[Path] | None, option("FILE", "Texts to read; repeatable.", "--file")]
BY_HELP = "Group shares by this (default: domain or source)."
By = Annotated[Literal["document", "source", "domain", "license"] | None, option(None, BY_HELP)]
METHOD_HELP = "evidence, or source: PRISM's A = Σ α μ."
Method = Annotated[Literal["evidence", "source"], option(None, METHOD_HELP)]
Data = Annotated[Path | None, option("DIR", "Local files (default: from the hub).")]
Tasks = Annotated[str | None, option("A,B", "Only these tasks.")]
Split = Annotated[Literal["train", "heldout", "all"], option(None, "Documents to read.")]
Layer = Annotated[int | None, option("N", "Only this layer.")]
Temperature = Annotated[float, option("T", "0 takes the top token.", min=0)]
Seed = Annotated[int, option("S", "Random seed.", min=0)]
Chat = Annotated[bool, flag("--chat", "Send the text as a user message.")]
System = Annotated[str | None, option("WORDS", "System prompt (with --chat).")]
Html = Annotated[Path | None, option("FILE", "Write a self-contained page.")]
OutDir = Annotated[Path | None, option("DIR", "Write results into this directory.")]
OutJson = Annotated[Path | None, option("FILE", "Write the figures as JSON.")]
Where = Annotated[list[str] | None, option("COLUMN=VALUE", "Only matching text; repeatable.")]
Window = Annotated[int | None, option("N", "Tokens read at once (default: up to 1,024).")]
Stride = Annotated[int | None, option("N", "Tokens between windows (default: 3/4 of one).", min=1)]
Contexts = Annotated[int, option("L", "Contexts stored per prototype.", min=1)]
PositionShare = Annotated[float, option("SHARE", "Share of the windows to read.")]
Codes = Annotated[str, option("NAME", "int8, or pq: a fourth of the size.", "--codes")]
ENDPOINT_HELP = "An OpenAI-compatible endpoint; key: OPENAI_API_KEY."
Endpoint = Annotated[str | None, option("URL", ENDPOINT_HELP)]
EndpointModel = Annotated[str | None, option("NAME", "Model at the endpoint.")]
Host = Annotated[str, option("ADDRESS", "Address; others can reach 0.0.0.0.")]
Port = Annotated[int, option("N", "Port; 0: a free one.", min=0, max=65535)]
Controller = Annotated[Path | None, option("FILE", "Apply this controller.")]


def split_names(text: str | None) -> list[str] | None:
    """Split a list at its commas."""
    return None if text is None else [name.strip() for name in text.split(",")]


def build_prompt(text: str, chat: bool, system: str | None) -> str | Messages:
    """Return the input of a model: the text, or the messages of a question with ``--chat``."""
    if system is not None and not chat:
        raise InputError("--system is a system prompt: add --chat, or leave it out.")
    if chat and not text.strip():
        raise InputError("the question is empty: expected words to send to the model.")
    from prismlm.corpus.chat import as_chat

    return as_chat(text, system) if chat else text


def build_prompts(
    texts: Sequence[str | Messages], chat: bool, system: str | None
) -> list[str | Messages]:
    """Return the inputs of a model, as :func:`build_prompt`; chats are inputs already."""
    if not any(isinstance(text, str) for text in texts):
        check_unused("the file holds only chats", system=system)
    return [build_prompt(text, chat, system) if isinstance(text, str) else text for text in texts]


def check_one_of(expected: str, *values: object) -> None:
    """Raise InputError unless exactly one of two alternatives is present."""
    present = sum(bool(value) or value == "" for value in values)
    if present != 1:
        raise InputError(f"expected {expected}, got {'both' if present else 'neither'}.")


def check_unused(reason: str, **given: object) -> None:
    """Raise InputError if options are given, not None or False, that would have no effect."""
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        raise InputError(f"{reason}: leave out {options}.")


def check_output_files(*inputs: Path | str | None, overwrite: bool, **files: Path | None) -> None:
    """Check output files, passed by their extensions, as :func:`check_outputs`."""
    check_outputs(*files.values(), inputs=inputs, overwrite=overwrite)
    for extension, path in files.items():
        check_ending(path, f".{extension}")


def group_with_default(default: str, help: str) -> typer.Typer:
    """Return a group that runs ``default`` where the first argument is not a command."""

    class GroupWithDefault(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] != "--help":
                args = [default, *args]
            return super().parse_args(ctx, args)

    return typer.Typer(cls=GroupWithDefault, no_args_is_help=True, help=help)


def require_packages(*packages: str) -> None:
    """Raise ModuleNotFoundError, which names the extra, for a package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def open_endpoint(url: str | None, model: str | None, *limits: Any) -> NamedEndpoint | None:
    """Return an endpoint, None without one; InputError for half of one."""
    if url is None and model is None:
        return None
    if url is None or model is None:
        raise InputError("--endpoint URL and --endpoint-model NAME go together: give both.")
    require_packages("openai")
    from prismlm.lens.labels.endpoint import Endpoint

    return Endpoint(url, model, *limits)


def parse_shard(shard: str | None) -> tuple[int, int]:
    """Return which part to make, from 0, of how many: that of --shard, of this process, or all."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if shard is None:
        return int(os.environ.get("RANK", "0")), processes
    if processes > 1:
        raise InputError("--shard and torchrun both choose a part: use one of them.")
    part = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard)
    if part is None or not 1 <= int(part[1]) <= int(part[2]):
        raise InputError(f"--shard {shard}: expected I/N, for example 3/8, the third of eight.")
    return int(part[1]) - 1, int(part[2])


def count_parts(
    parts: int | None, workers: int | None, engine: str, shard: str | None = None
) -> int | None:
    """Return the number of parts, or None for work that is not divided."""
    if parts is None and workers is None and engine == "local":
        return None
    if shard is not None or "WORLD_SIZE" in os.environ:
        raise InputError("--shard, --workers and torchrun divide the work: use one of them.")
    return parts or workers or 1


def open_model(
    model: Path,
    lens: str | None = None,
    corpus: Path | None = None,
    device: str = "cpu",
    controller: Path | None = None,
) -> PrismLM:
    """Open a model, under a controller if there is one, and say so."""
    import prismlm
    from prismlm.hub import model_directory
    from prismlm.interventions.plan import install

    directory = model_directory(model)  # the hub's own bars and a spinner do not go together
    with output.spinner("Opening the model"):
        lm = prismlm.load(directory, lens=lens, corpus=corpus, device=device)
    if controller is not None:
        install(lm, [prismlm.Controller.load(controller)])
    return lm


def open_with_lens(model: Path, lens: str | None) -> tuple[PrismLM, OpenedLens]:
    """Open a model with its lens; InputError if it has none."""
    lm = open_model(model, lens)
    return lm, lm.lens_for("table of its prototypes")
