"""The figures of ``prismlm eval`` as a table."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from prismlm.cli.output import console_for_reading, plain, table_of

NAMES = {
    "plain": "plain",
    "prototype_only": "prototypes only",
    "residual_only": "residual only",
}


def print_result(result: dict[str, Any]) -> None:
    """Print each task's accuracies beside chance, with their changes from plain."""
    console = console_for_reading()
    predictors, metric = result["predictors"], result["metric"]
    console.print(Text(plain(result["model"]), style="bold"))
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
    console.print(Text(_notes(result), style="dim"), soft_wrap=True)


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
