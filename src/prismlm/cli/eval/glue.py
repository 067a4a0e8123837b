"""prismlm eval glue: fine-tune a model on GLUE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from prismlm.cli.options import DryRun, Json, Model, flag, number, option
from prismlm.cli.output import console_for_reading, plain, print_cost, print_json, table_of
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

DevLimit = Annotated[int | None, option("N", "Rows of each dev set, the same for all seeds.")]
Rate = Annotated[
    float | None, number("R", "Default: that of --search, or the source's for the model's type.")
]
Warmup = Annotated[
    float | None, number("W", "Share of the steps (default: as --learning-rate).", 0, 1)
]
Search = Annotated[bool, flag("--search", "Choose both on SST-2 and MNLI, for later runs.")]
FromScratch = Annotated[
    bool, flag("--from-scratch", "Beside it, the same model without its training.")
]


def glue(
    model: Model,
    tasks: Annotated[str | None, option("A,B", "Only these, such as cola,sst2.")] = None,
    data: Annotated[
        Path | None, option("DIR", "Parquet files of the tasks (default: the hub).")
    ] = None,
    limit: Annotated[int | None, option("N", "Rows trained on, drawn by the seed.")] = None,
    dev_limit: DevLimit = None,
    seeds: Annotated[str, option("A,B", "A run for each.")] = "0,1,2",
    learning_rate: Rate = None,
    warmup: Warmup = None,
    search: Search = False,
    from_scratch: FromScratch = False,
    epochs: Annotated[int, option("N", "At most.")] = 3,
    test: Annotated[bool, flag("--test/--no-test", "Predict the test sets that are there.")] = True,
    device: Annotated[str, option("DEVICE", "Such as cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, option("DIR", "Where runs are kept (default: MODEL/eval/glue).")
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on GLUE's nine tasks, all of its weights, and measure it on their dev sets.

    Finished runs are kept: run the same command again to resume.
    """
    from prismlm.eval.glue import study
    from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions
    from prismlm.eval.glue.study import estimate_glue
    from prismlm.eval.glue.tasks import tasks_of
    from prismlm.run_state import orderly_end

    options = GlueOptions(data, limit, dev_limit, learning_rate, warmup, epochs, test=test)
    names, drawn = None if tasks is None else _listed(tasks), _seeds(seeds)
    tasks_of(names)
    place = model / "eval" / "glue" if out is None else out
    check_outputs(directory=place, inputs=(model, data), overwrite=True)
    lm = GlueModel(model, device=device)
    with orderly_end():
        if dry_run:
            if search:
                kept, options = place / study.SEARCH, replace(options, test=False)
                wanted = study.runs_searched(options, drawn[0])
            else:
                kept, (options, _) = place, study.with_rate(lm, place, options)
                wanted = study.runs_wanted(options, names, drawn, from_scratch=from_scratch)
            print_cost(estimate_glue(lm, kept, options, wanted), as_json=as_json)
            return
        from prismlm.cli.progress import ConsoleReporter

        if search:
            result = study.search(lm, place, options, drawn[0], ConsoleReporter())
        else:
            result = study.run_glue(
                lm, place, options, names, drawn,
                from_scratch=from_scratch, progress=ConsoleReporter(),
            )  # fmt: skip
    shown = print_search if search else print_figures
    (print_json if as_json else shown)(result)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _seeds(text: str) -> list[int]:
    found = _listed(text)
    if not all(part.isdecimal() and len(part) < 20 for part in found):
        raise InputError(f"--seeds is {text!r}: expected whole numbers, such as 0,1,2.")
    return [int(part) for part in dict.fromkeys(found)]


def print_figures(result: dict[str, Any]) -> None:
    """Print each task's metrics over seeds, beside a constant answer and training from scratch."""
    console = console_for_reading()
    console.print(plain(result["name"]), style="bold")
    headings = ("*trained on", "*rows", "metric", "*mean (seeds)", "*constant", "*from scratch")
    table = table_of("task", *headings)
    for row in result["tasks"]:
        title = f"{row['title']} test" if row["split"].startswith("test") else row["title"]
        cells = [title, _share(row["train"]), _share(row["measured"])]
        for metric in row["metrics"]:
            found, fresh = row["fine_tuned"], row["from_scratch"]
            values = [100 * value for value in found["values"][metric]]
            spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
            table.add_row(
                *(cells if metric == row["metrics"][0] else ["", "", ""]),
                metric,
                f"{100 * found['mean'][metric]:.1f}{spread}",
                f"{100 * row['constant'][metric]:.1f}",
                f"{100 * fresh['mean'][metric]:.1f}" if fresh else "–",
            )
    console.print(table)
    rate = f"learning rate {result['learning_rate']:g}, warm-up {result['warmup']:g}"
    notes = [f"{rate} ({result['rate_from']})", "dev sets unless test is said", "figures × 100"]
    console.print(" · ".join(notes), style="dim", soft_wrap=True)


def print_search(result: dict[str, Any]) -> None:
    """Print what every rate and warm-up reached on dev, and the choice."""
    console = console_for_reading()
    table = table_of("learning rate", "warm-up", "*SST-2", "*MNLI")
    for one in result["tried"]:
        figures = (f"{100 * one[name]:.1f}" for name in ("sst2", "mnli"))
        table.add_row(f"{one['learning_rate']:g}", f"{one['warmup']:g}", *figures)
    console.print(table)
    chosen = f"chosen: {result['learning_rate']:g} with warm-up {result['warmup']:g}"
    console.print(chosen, style="bold")


def _share(rows: dict[str, Any]) -> str:
    """Return how many rows there are, of how many that GLUE has."""
    whole = rows["rows"] == rows["of"]
    return f"{rows['rows']:,}" if whole else f"{rows['rows']:,} of {rows['of']:,}"
