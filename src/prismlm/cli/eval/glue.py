"""prismlm eval glue: fine-tune a model on GLUE."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli.options import flag, option, split_names
from prismlm.cli.output import print_json, show_rows
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

DevLimit = Annotated[int | None, option("N", "Rows of each dev set, the same for all seeds.")]
Rate = Annotated[float | None, option("R", "Default: of --search, or the source.", least=0)]
Warmup = Annotated[float | None, option("W", "Share of the steps.", least=0, most=1)]
Search = Annotated[bool, flag("--search", "Choose both on SST-2 and MNLI, for later runs.")]
FromScratch = Annotated[bool, flag("--from-scratch", "The same model without its training too.")]


def glue(
    model: opt.Model,
    tasks: Annotated[str | None, option("A,B", "Only these, such as cola,sst2.")] = None,
    data: Annotated[Path | None, option("DIR", "Parquet files (default: the hub).")] = None,
    limit: Annotated[int | None, option("N", "Rows trained on, drawn by the seed.")] = None,
    dev_limit: DevLimit = None,
    seeds: Annotated[str, option("A,B", "A run for each.")] = "0,1,2",
    learning_rate: Rate = None,
    warmup: Warmup = None,
    search: Search = False,
    from_scratch: FromScratch = False,
    epochs: Annotated[int, option("N", "At most.")] = 3,
    test: Annotated[bool, flag("--test/--no-test", "Predict the test sets that are there.")] = True,
    device: opt.Device = "cpu",
    out: opt.OutDir = None,
    as_json: opt.Json = False,
) -> None:
    """Fine-tune a model on GLUE's nine tasks, all of its weights, and measure it on their dev sets.

    Finished runs are kept in MODEL/eval/glue or --out: run the same command again to resume.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.eval.glue import study
    from prismlm.eval.glue.data import tasks_of
    from prismlm.eval.glue.fine_tune import GlueModel, GlueOptions
    from prismlm.run_state import orderly_end

    options = GlueOptions(data, limit, dev_limit, learning_rate, warmup, epochs, test=test)
    names, drawn = split_names(tasks), _seeds(seeds)
    tasks_of(names)
    place = model / "eval" / "glue" if out is None else out
    check_outputs(directory=place, inputs=(model, data), overwrite=True)
    lm, progress = GlueModel(model, device=device), ConsoleReporter()
    with orderly_end():
        if search:
            result = study.search(lm, place, options, drawn[0], progress)
        else:
            how: dict[str, Any] = {"from_scratch": from_scratch, "progress": progress}
            result = study.run_glue(lm, place, options, names, drawn, **how)
    if as_json:
        print_json(result)
    elif search:
        columns = {"learning_rate": "g", "warmup": "g", "sst2": ".3f", "mnli": ".3f"}
        chosen = {name: result[name] for name in ("learning_rate", "warmup")}
        show_rows("Dev accuracies; the choice stands below", columns, result["tried"], **chosen)
    else:
        _print_figures(result)


def _seeds(text: str) -> list[int]:
    given = split_names(text) or []
    if not all(part.isdecimal() and len(part) < 20 for part in given):
        raise InputError(f"--seeds is {text!r}: expected whole numbers, such as 0,1,2.")
    return [int(part) for part in dict.fromkeys(given)]


def _print_figures(result: dict[str, Any]) -> None:
    """Print each task's metrics over seeds, a constant answer, and training from scratch."""
    rows: list[dict[str, Any]] = []
    for row in result["tasks"]:
        test = " test" if row["split"].startswith("test") else ""
        tuned, fresh = row["fine_tuned"], row["from_scratch"]
        for metric in row["metrics"]:
            values = tuned["values"][metric]
            rows.append(
                {
                    "task": row["title"] + test,
                    "trained on": row["train"]["rows"],
                    "rows": row["measured"]["rows"],
                    "metric": metric,
                    "mean": tuned["mean"][metric],
                    "least": min(values),
                    "most": max(values),
                    "constant": row["constant"][metric],
                    "from scratch": fresh and fresh["mean"][metric],
                }
            )
    columns = {"task": "", "trained on": ",", "rows": ",", "metric": ""}
    columns |= dict.fromkeys(("mean", "least", "most", "constant", "from scratch"), ".3f")
    facts = {name: result[name] for name in ("learning_rate", "warmup", "rate_from")}
    title = f"{result['name']}: means over seeds, of dev sets unless test is said"
    show_rows(title, columns, rows, **facts)
