"""prismlm eval: benchmarks asked of a model and of its parts; prismlm lm-eval: any others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prismlm.cli import options as opt
from prismlm.cli.options import option, split_names
from prismlm.cli.output import print_json, show_rows, wrote
from prismlm.outputs import check_outputs, output_file

PLOT_FILE = "eval.svg"
# lm-eval reads its own --help.
PASSED_ON = {"ignore_unknown_options": True, "help_option_names": list[str]()}


def evaluate(
    model: opt.Model,
    suite: Annotated[str, option("SUITE", "seed: PRISM's eight tasks.")] = "seed",
    tasks: Annotated[str | None, option("A,B", "Only these tasks of the suite.")] = None,
    data: Annotated[Path | None, option("DIR", "Parquet files (default: the hub).")] = None,
    limit: Annotated[int | None, option("N", "Questions of each task, drawn by the seed.")] = None,
    shots: Annotated[int, option("N", "Examples before each question.")] = 0,
    seed: opt.Seed = 0,
    batch_size: Annotated[int, option("N", "Texts read at once.")] = 8,
    device: opt.Device = "cpu",
    out: opt.OutDir = None,
    as_json: opt.Json = False,
) -> None:
    """Ask benchmarks of a model, of its prototypes alone and of its residual alone.

    Finished tasks are kept in MODEL/eval/SUITE or --out: run the same command again to resume.
    """
    import logging

    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.benchmarks import benchmarks_of
    from prismlm.eval.suite import RESULT_FILE, SuiteOptions, open_predictors, run_suite
    from prismlm.pages.eval_plots import accuracy_figure
    from prismlm.run_state import orderly_end

    names = split_names(tasks)
    options = SuiteOptions(suite=suite, data=data, limit=limit, seed=seed, shots=shots)
    benchmarks_of(suite, names)
    place = model / "eval" / suite if out is None else out
    check_outputs(directory=place, inputs=(model, data), overwrite=True)
    # lm-eval's notices and the bars of its documents stay off the console.
    import datasets

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm = open_predictors(model, device=device, batch_size=batch_size)
    with orderly_end():
        result = run_suite(lm, str(model), place, options, names, ConsoleReporter())
    with output_file(place / PLOT_FILE) as temporary:
        # No date in it: the same result is the same file but for ids.
        accuracy_figure(result).savefig(temporary, format="svg", metadata={"Date": None})
    wrote(place / RESULT_FILE, place / PLOT_FILE)
    print_json(result) if as_json else _print_result(result)


def lm_eval(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="As lm-eval takes them.")
    ] = None,
) -> None:
    """Run lm-eval's own command line over prismlm's models and uncertainty feedback."""
    from prismlm.eval.harness import run_harness

    run_harness(arguments or [])


def _print_result(result: dict[str, Any]) -> None:
    """Print each task's accuracies, chance, and changes from plain."""
    metric = result["metric"]
    rows = [
        {"task": task["title"], "questions": task["questions"], "chance": task["chance"]}
        | {name: _figure(figures[metric]) for name, figures in task["predictors"].items()}
        for task in result["tasks"]
    ]
    rows.append({"task": "mean"} | {name: _figure(one) for name, one in result["mean"].items()})
    columns = {"task": "", "questions": ",", "chance": ".1%"}
    columns |= dict.fromkeys(result["predictors"], "")
    facts = {
        "metric": f"{metric} of lm-eval {result['versions']['lm_eval']}",
        "examples before each question": result["shots"] or "0-shot",
        "questions cut at the left": sum(task["truncated"] for task in result["tasks"]),
    }
    title = f"{result['model']}: accuracy ± one standard error, in brackets the change from plain"
    show_rows(title, columns, rows, **facts)


def _figure(figure: dict[str, Any]) -> str:
    error = "" if figure["stderr"] is None else f" ± {figure['stderr']:.1%}"
    change = figure.get("change")
    if change is None:
        return f"{figure['value']:.1%}{error}"
    spread = "" if figure["change_stderr"] is None else f" ± {figure['change_stderr']:.0f}"
    return f"{figure['value']:.1%} ({change:+.0f}{spread} %)"
