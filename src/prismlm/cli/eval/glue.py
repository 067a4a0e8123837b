"""prismlm eval glue: fine-tune a model on GLUE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from prismlm.cli.options import DryRun, Json, Model, flag, number, option
from prismlm.cli.output import print_cost, print_json
from prismlm.errors import InputError
from prismlm.outputs import check_outputs

Tasks = Annotated[str | None, option("A,B", "Only these, such as cola,sst2.")]
Data = Annotated[Path | None, option("DIR", "Parquet files of the tasks; else the hub.")]
Limit = Annotated[int | None, option("N", "Rows trained on, drawn by the seed.")]
DevLimit = Annotated[int | None, option("N", "Rows of each dev set, the same for all seeds.")]
Seeds = Annotated[str, option("A,B", "A run for each.")]
Rate = Annotated[
    float | None, number("R", "Else that of --search, or the source's for the model's type.")
]
Warmup = Annotated[float | None, number("W", "Share of the steps; else as --learning-rate.", 0, 1)]
Search = Annotated[bool, flag("--search", "Choose both on SST-2 and MNLI, for later runs.")]
FromScratch = Annotated[
    bool, flag("--from-scratch", "Beside it, the same model without its training.")
]
Epochs = Annotated[int, option("N", "At most.")]
Test = Annotated[bool, flag("--test/--no-test", "Predict the test sets that are there.")]
Device = Annotated[str, option("DEVICE", "Such as cpu or cuda.")]
Out = Annotated[Path | None, option("DIR", "Where runs are kept; else MODEL/eval/glue.")]


def glue(
    model: Model,
    tasks: Tasks = None,
    data: Data = None,
    limit: Limit = None,
    dev_limit: DevLimit = None,
    seeds: Seeds = "0,1,2",
    learning_rate: Rate = None,
    warmup: Warmup = None,
    search: Search = False,
    from_scratch: FromScratch = False,
    epochs: Epochs = 3,
    test: Test = True,
    device: Device = "cpu",
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on GLUE's nine tasks, all of its weights, and measure it on their dev sets.

    Finished runs are kept: the same command goes on where it was stopped.
    """
    from prismlm.eval.glue import study
    from prismlm.eval.glue.classifier import GlueModel
    from prismlm.eval.glue.estimate import estimate_glue
    from prismlm.eval.glue.runs import GlueOptions
    from prismlm.eval.glue.tasks import tasks_of
    from prismlm.run_state import orderly_end

    options = GlueOptions(data, limit, dev_limit, learning_rate, warmup, epochs, test=test)
    names, drawn = None if tasks is None else _listed(tasks), _seeds(seeds)
    tasks_of(names)
    place = model / "eval" / "glue" if out is None else out
    # What ended there before is gone on from.
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
        from prismlm.cli.printing.glue import print_figures, print_search
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
    if not all(part.isdecimal() for part in found):
        raise InputError(f"--seeds is {text!r}: expected whole numbers, such as 0,1,2.")
    return [int(part) for part in dict.fromkeys(found)]
