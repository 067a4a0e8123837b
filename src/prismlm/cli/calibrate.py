"""prismlm calibrate: labelled examples to a controller of prototypes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prismlm.cli import options as opt
from prismlm.cli import output
from prismlm.cli.options import option
from prismlm.cli.progress import ConsoleReporter, spinner

if TYPE_CHECKING:
    from prismlm.explain.controlled import Controlled
    from prismlm.interventions.calibration import Calibration
    from prismlm.lens.opened_model import OpenedModel

TASK_HELP = "Rows of context, choices and label, or prompt, chosen and rejected: jsonl, parquet."
Task = Annotated[Path, option("FILE", TASK_HELP, "--task")]
Test = Annotated[Path | None, option("FILE", "Test on these (default: a fifth of the task).")]
Out = Annotated[Path, option("FILE", "Where to write the controller.", "--out")]
SHOWN = 20


def calibrate(
    model: opt.Model,
    task: Task,
    out: Out,
    test: Test = None,
    lens: opt.Lens = None,
    device: opt.Device = "cpu",
    seed: opt.Seed = 0,
    overwrite: opt.Overwrite = False,
    as_json: opt.Json = False,
) -> None:
    """Fit a controller, scales of a few prototypes, to labelled examples; test it on others."""
    opt.check_output_files(model, task, test, overwrite=overwrite, safetensors=out)
    from prismlm.interventions import calibration

    examples = calibration.read_examples(task)
    tested = None if test is None else calibration.read_examples(test)
    import prismlm

    with spinner("Opening the model"):
        lm = prismlm.load(model, lens=lens, device=device)
    how: dict[str, Any] = {"seed": seed, "description": task.name, "progress": ConsoleReporter()}
    result = calibration.calibrate(lm, examples, tested, **how)
    output.write(out, result.controller.save)
    value = {"model": str(model), "task": str(task)} | result.to_dict()
    output.show(value, as_json, lambda: _print(lm, result))


def _print(lm: OpenedModel, result: Calibration) -> None:
    scales = result.controller.scales
    if not scales:
        output.say(
            "No scale of a prototype lowers the loss on held-out examples, so the controller "
            "changes nothing: give more examples, or take it that prototypes do not tell here."
        )
    rows = [
        {"prototype": i, "scale": s, "name": "" if lm.lens is None else lm.lens.names[i]}
        for i, s in sorted(scales, key=lambda pair: -abs(pair[1] - 1))[:SHOWN]
    ]
    change = result.change
    output.print_rows(
        "",
        "prototype scale:.2f name",
        rows,
        prototypes_turned=len(scales),
        examples_fitted=result.fitted,
    )
    output.say(
        f"right on {result.tested} other examples: {result.before:.1%} → {result.after:.1%}, "
        f"a change of {100 * change.value:+.1f} points ({100 * change.low:+.1f} to "
        f"{100 * change.high:+.1f})"
    )


def print_controlled(found: Controlled) -> None:
    """Print what a controller did to an answer."""
    if found.position is None:
        output.say("With the controller the answer is as without it.\n", style="bold")
        return
    old, new = (output.token_text(token) for token in (found.token_without, found.token_with))
    output.say(f"without the controller: {found.without.strip()}", style="dim")
    output.say(
        f"They part where “{new}” takes the place of “{old}”, which led by {found.gap:.2f}: turned "
        f"prototypes give “{new}” {found.gained:+.2f} on it."
    )
    rows = [
        {"prototype": m.prototype, "scale": m.scale, "gained": m.gained, "name": m.name or ""}
        for m in found.moves
    ]
    output.print_rows("", "prototype scale:.2f gained:+.3f name", rows)
    for move in found.moves[:3]:
        for context in move.contexts:
            where = context["title"] or context["doc_id"], context["license"]
            text = " ".join(context["text"].split())
            output.say(
                f"  #{move.prototype}  {text}  {' · '.join(filter(None, where))}", style="dim"
            )
    output.say("")
