"""prismlm eval: benchmarks asked of a model and of its parts; prismlm lm-eval: any others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.options import Json, Model, option
from prismlm.cli.output import console_for_reading, print_json
from prismlm.cli.printing.tables import show
from prismlm.instruments.results import Table
from prismlm.outputs import check_outputs, output_file

NAMES = {
    "plain": "plain",
    "prototype_only": "prototypes only",
    "residual_only": "residual only",
}
PLOT_FILE = "eval.svg"
# lm-eval reads its own --help.
PASSED_ON = {"ignore_unknown_options": True, "help_option_names": list[str]()}


def evaluate(
    model: Model,
    suite: Annotated[str, option("SUITE", "seed: PRISM's eight tasks.")] = "seed",
    tasks: Annotated[str | None, option("A,B", "Only these tasks of the suite.")] = None,
    data: Annotated[
        Path | None, option("DIR", "Parquet files of the tasks (default: the hub).")
    ] = None,
    limit: Annotated[int | None, option("N", "Questions of each task, drawn by the seed.")] = None,
    shots: Annotated[int, option("N", "Examples before each question.")] = 0,
    seed: Annotated[int, option("S", "Of what is drawn.")] = 0,
    batch_size: Annotated[int, option("N", "Texts read at once.")] = 8,
    device: Annotated[str, option("DEVICE", "Such as cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, option("DIR", "Where answers are kept (default: MODEL/eval/SUITE).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask benchmarks of a model, of its prototypes alone and of its residual alone.

    Finished tasks are kept: run the same command again to resume.
    """
    from prismlm.eval.benchmarks import benchmarks_of
    from prismlm.eval.suite import (
        RESULT_FILE,
        SuiteOptions,
        open_predictors,
        run_suite,
    )
    from prismlm.pages.eval_plots import accuracy_figure
    from prismlm.run_state import orderly_end

    names = None if tasks is None else [name.strip() for name in tasks.split(",")]
    options = SuiteOptions(suite=suite, data=data, limit=limit, seed=seed, shots=shots)
    benchmarks_of(suite, names)
    place = model / "eval" / suite if out is None else out
    check_outputs(directory=place, inputs=(model, data), overwrite=True)
    _quiet()
    lm = open_predictors(model, device=device, batch_size=batch_size)
    with orderly_end():
        from prismlm.cli.progress import ConsoleReporter

        result = run_suite(lm, str(model), place, options, names, ConsoleReporter())
    with output_file(place / PLOT_FILE) as temporary:
        # No date in it: the same result is the same file but for ids.
        accuracy_figure(result).savefig(temporary, format="svg", metadata={"Date": None})
    for name in (RESULT_FILE, PLOT_FILE):
        typer.echo(f"wrote {place / name}", err=True)
    print_json(result) if as_json else print_result(result)


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


def print_result(result: dict[str, Any]) -> None:
    """Print each task's accuracies, chance, and changes from plain."""
    metric, rows = result["metric"], list[dict[str, Any]]()
    tasks = [(t["title"], t, {n: f[metric] for n, f in t["predictors"].items()})
             for t in result["tasks"]]  # fmt: skip
    for title, task, figures in [*tasks, ("mean", {}, result["mean"])]:
        row = {"task": title, "questions": task.get("questions"), "chance": task.get("chance")}
        rows.append(row | {NAMES[name]: _figure(one) for name, one in figures.items()})
    columns = {"task": "", "questions": ",", "chance": ".1%"}
    columns |= {NAMES[name]: "" for name in result["predictors"]}
    facts = {
        "metric": f"{metric} of lm-eval {result['versions']['lm_eval']}",
        "examples before each question": result["shots"] or "0-shot",
        "questions cut at the left": sum(task["truncated"] for task in result["tasks"]),
    }
    title = f"{result['model']}: accuracy ± one standard error, in brackets the change from plain"
    show(console_for_reading(), Table(title, columns, tuple(rows), facts))


def _figure(figure: dict[str, Any]) -> str:
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.1%}"
    change = figure.get("change")
    if change is None:
        return f"{figure['value']:.1%}{error}"
    spread = "" if figure["change_stderr"] is None else f" ± {figure['change_stderr']:.0f}"
    return f"{figure['value']:.1%} ({change:+.0f}{spread} %)"
