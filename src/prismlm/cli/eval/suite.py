"""prismlm eval: benchmarks asked of a model and of its parts; prismlm lm-eval: any others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.options import DryRun, Json, Model, option
from prismlm.cli.output import print_cost, print_json
from prismlm.outputs import check_outputs, output_file

PLOT_FILE = "eval.svg"
# lm-eval reads its own --help.
PASSED_ON = {"ignore_unknown_options": True, "help_option_names": list[str]()}


def evaluate(
    model: Model,
    suite: Annotated[str, option("SUITE", "seed: PRISM's eight tasks.")] = "seed",
    tasks: Annotated[str | None, option("A,B", "Only these tasks of the suite.")] = None,
    data: Annotated[Path | None, option("DIR", "Parquet files of the tasks; else the hub.")] = None,
    limit: Annotated[int | None, option("N", "Questions of each task, drawn by the seed.")] = None,
    shots: Annotated[int, option("N", "Examples before each question.")] = 0,
    seed: Annotated[int, option("S", "Of what is drawn.")] = 0,
    batch_size: Annotated[int, option("N", "Texts read at once.")] = 8,
    device: Annotated[str, option("DEVICE", "Such as cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, option("DIR", "Where answers are kept; else MODEL/eval/SUITE.")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Ask benchmarks of a model, of its prototypes alone and of its residual alone.

    Finished tasks are kept: the same command goes on where it was stopped.
    """
    from prismlm.eval.benchmarks import benchmarks_of
    from prismlm.eval.suite import RESULT_FILE, SuiteOptions, open_predictors, run_suite
    from prismlm.eval.suite_estimate import estimate_suite
    from prismlm.pages.eval_plots import accuracy_figure
    from prismlm.run_state import orderly_end

    names = None if tasks is None else [name.strip() for name in tasks.split(",")]
    options = SuiteOptions(suite=suite, data=data, limit=limit, seed=seed, shots=shots)
    benchmarks_of(suite, names)
    place = model / "eval" / suite if out is None else out
    # What was answered there before is gone on from.
    check_outputs(directory=place, inputs=(model, data), overwrite=True)
    _quiet()
    lm = open_predictors(model, device=device, batch_size=batch_size)
    with orderly_end():
        if dry_run:
            print_cost(estimate_suite(lm, place, options, names), as_json=as_json)
            return
        from prismlm.cli.progress import ConsoleReporter

        result = run_suite(lm, str(model), place, options, names, ConsoleReporter())
    _draw(accuracy_figure(result), place / PLOT_FILE)
    for name in (RESULT_FILE, PLOT_FILE):
        typer.echo(f"wrote {place / name}", err=True)
    if as_json:
        print_json(result)
    else:
        from prismlm.cli.printing.eval import print_result

        print_result(result)


def lm_eval(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="As lm-eval takes them.")
    ] = None,
) -> None:
    """Run lm-eval's own command line over prismlm's models and uncertainty feedback."""
    from prismlm.eval.harness import run_harness

    run_harness(arguments or [])


def _quiet() -> None:
    """Keep lm-eval's notices and the bars of its documents off the console."""
    import logging

    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()


def _draw(figure: Any, path: Path) -> None:
    with output_file(path) as temporary:
        # No date in it: the same result is the same file but for ids.
        figure.savefig(temporary, format="svg", metadata={"Date": None})
