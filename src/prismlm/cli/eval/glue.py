"""prismlm eval glue: fine-tune a model on GLUE."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prismlm.cli.options import Json, Model, flag, number, option
from prismlm.cli.output import console_for_reading, print_json
from prismlm.cli.printing.tables import show
from prismlm.errors import InputError
from prismlm.instruments.results import Table
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
    as_json: Json = False,
) -> None:
    """Fine-tune a model on GLUE's nine tasks, all of its weights, and measure it on their dev sets.

    Finished runs are kept: run the same command again to resume.
    """
    from prismlm.eval.glue import study
    from prismlm.eval.glue.data import tasks_of
    from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions
    from prismlm.run_state import orderly_end

    options = GlueOptions(data, limit, dev_limit, learning_rate, warmup, epochs, test=test)
    names, drawn = None if tasks is None else _listed(tasks), _seeds(seeds)
    tasks_of(names)
    place = model / "eval" / "glue" if out is None else out
    check_outputs(directory=place, inputs=(model, data), overwrite=True)
    lm = GlueModel(model, device=device)
    with orderly_end():
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
    """Print each task's metrics over seeds, a constant answer, and training from scratch."""
    rows: list[dict[str, Any]] = []
    for row in result["tasks"]:
        test = " test" if row["split"].startswith("test") else ""
        for metric in row["metrics"]:
            found, fresh = row["fine_tuned"], row["from_scratch"]
            values = found["values"][metric]
            rows.append(
                {
                    "task": row["title"] + test,
                    "trained on": _share(row["train"]),
                    "rows": _share(row["measured"]),
                    "metric": metric,
                    "mean": found["mean"][metric],
                    "least": min(values),
                    "most": max(values),
                    "constant": row["constant"][metric],
                    "from scratch": fresh and fresh["mean"][metric],
                }
            )
    texts, figures = list(rows[0])[:4], list(rows[0])[4:]
    columns = dict.fromkeys(texts, "") | dict.fromkeys(figures, ".3f")
    facts = {name: result[name] for name in ("learning_rate", "warmup", "rate_from")}
    title = f"{result['name']}: means over seeds, of dev sets unless test is said"
    show(console_for_reading(), Table(title, columns, tuple(rows), facts))


def print_search(result: dict[str, Any]) -> None:
    """Print what every rate and warm-up reached on dev, and the choice."""
    columns = {"learning_rate": "g", "warmup": "g", "sst2": ".3f", "mnli": ".3f"}
    chosen = {name: result[name] for name in ("learning_rate", "warmup")}
    title = "Dev accuracies; the choice stands below"
    show(console_for_reading(), Table(title, columns, tuple(result["tried"]), chosen))


def _share(rows: dict[str, Any]) -> str:
    """Return how many rows there are, of how many that GLUE has."""
    whole = rows["rows"] == rows["of"]
    return f"{rows['rows']:,}" if whole else f"{rows['rows']:,} of {rows['of']:,}"
