"""prismlm eval: benchmarks asked of a model and of its parts; prismlm lm-eval: any others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli.options import DryRun, Json, Model, option
from prismlm.cli.output import console_for_reading, plain, print_cost, print_json, table_of
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
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Ask benchmarks of a model, of its prototypes alone and of its residual alone.

    Finished tasks are kept: run the same command again to resume.
    """
    from prismlm.eval.benchmarks import benchmarks_of
    from prismlm.eval.suite import (
        RESULT_FILE,
        SuiteOptions,
        estimate_suite,
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
        if dry_run:
            print_cost(estimate_suite(lm, place, options, names), as_json=as_json)
            return
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
    """Print each task's accuracies beside chance, with their changes from plain."""
    console = console_for_reading()
    predictors, metric = result["predictors"], result["metric"]
    console.print(plain(result["model"]), style="bold")
    headings = ("questions", "chance", *(NAMES[name] for name in predictors))
    table = table_of("task", *(f"*{heading}" for heading in headings))
    for task in result["tasks"]:
        asked = f"{task['questions']:,}"
        if task["questions"] < task["of"]:
            asked += f" of {task['of']:,}"
        figures = (_figure(task["predictors"][name][metric]) for name in predictors)
        table.add_row(task["title"], asked, f"{task['chance']:.1%}", *figures)
    means = (_figure(result["mean"][name]) for name in predictors)
    table.add_row("mean", "", "", *means, style="bold")
    console.print(table)
    console.print(_notes(result), style="dim", soft_wrap=True)


def _figure(figure: dict[str, Any]) -> str:
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.1%}"
    change = figure.get("change")
    if change is None:
        return f"{figure['value']:.1%}{error}"
    spread = "" if figure["change_stderr"] is None else f" ± {figure['change_stderr']:.0f}"
    return f"{figure['value']:.1%} ({change:+.0f}{spread} %)"


def _notes(result: dict[str, Any]) -> str:
    shots = f"{result['shots']} examples before each question" if result["shots"] else "0-shot"
    notes = [f"{result['metric']} of lm-eval {result['versions']['lm_eval']}, {shots}"]
    if len(result["predictors"]) > 1:
        notes.append("in brackets the change from plain")
    notes.append("± one standard error")
    cut = sum(task["truncated"] for task in result["tasks"])
    if cut:
        notes.append(f"{cut:,} questions were cut at the left, being longer than the model reads")
    return " · ".join(notes)
