"""Write docs/results/seed_suite.md and .svg from seed_suite.json; ``--check`` only compares."""

from __future__ import annotations

from typing import Any

from benchmarks.attach.seed_suite_plot import STYLES, draw
from benchmarks.shared.pages import measured_on, page_options, publish, read_result, table_head

PARTS = ("prototype_only", "residual_only")
SURE = 1.96
"""Standard errors of a 95 % interval."""


def main() -> int:
    """Render, or say whether page and plot are up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "seed_suite.json", "attach.seed_suite")
    pages = {"seed_suite.md": render(result), "seed_suite.svg": draw(result["ours"])}
    return publish({given.results / name: page for name, page in pages.items()}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    ours = result["ours"]
    tasks, metric, limit = ours["tasks"], ours["metric"], ours["limit"]
    asked = f" --limit {limit}" if limit else ""
    lines = [
        "# PRISM's eight tasks on the demo's model",
        "",
        "Generated from `seed_suite.json` by `python -m benchmarks.attach.render_seed_suite`; the "
        "JSON by",
        "",
        f"    prismlm eval prismlm-demo/model --data DIR{asked} --out OURS",
        f"    prismlm eval SMOLLM2 --data DIR{asked} --out BASE",
        "    python -m benchmarks.attach.seed_suite OURS --base BASE",
        "",
        measured_on(result["environment"]),
        "",
        "PRISM's document calls a model with prototypes as good as one without if its accuracy on "
        f"these tasks is within ±{ours['band_percent']:g} %. Here the head is fitted to a model "
        "that stays as it is, so *plain* is that model, bit for bit, and the claim is asked of "
        "what the prototypes alone predict: SmolLM2-135M-Instruct, fine-tuned on the bundled "
        "sample, with the head that ships with the demo ([its figures](smollm2.md)). "
        f"{_questions(ours)}, {ours['shots']}-shot, {metric} of lm-eval "
        f"{ours['versions']['lm_eval']}.",
        "",
        "## In short",
        "",
        *_verdicts(tasks, ours),
        *_parts_compared(
            result["differences"]["residual_less_prototypes"],
            [task for task in tasks if _above(task, "plain", metric)],
            _chance(tasks),
        ),
        "",
        "![accuracies of the eight tasks](seed_suite.svg)",
        "",
        "Shaded: plain ± the band. Lines on bars: one standard error. Dashed: chance.",
        "",
        "## Accuracies",
        "",
        "± is one standard error over questions. In brackets: the change from plain in %, with the "
        "standard error of the differences question by question. *Most common*: always giving the "
        "answer that is right most often.",
        "",
        *table_head(
            f"| task | chance | most common | {' | '.join(name for _, name in STYLES.values())} |"
        ),
        *(_row(task, metric) for task in tasks),
        _mean_row(ours["mean"], _chance(tasks)),
        "",
        "## The model before fine-tuning, and what its authors publish",
        "",
        *(_base(result) if result["base"] else ["The model before fine-tuning was not asked."]),
        "",
        _published(result["published"]),
    ]
    return "\n".join(lines) + "\n"


def _questions(ours: dict[str, Any]) -> str:
    counts = {task["questions"] for task in ours["tasks"]}
    if len(counts) > 1:
        return "All questions" if ours["limit"] is None else "Up to so many questions a task"
    return f"{counts.pop():,} questions of each task, drawn by seed {ours['seed']}"


def _verdicts(tasks: list[dict[str, Any]], ours: dict[str, Any]) -> list[str]:
    """Say how many tasks are inside, and which tasks could have told."""
    metric, band = ours["metric"], ours["band_percent"]
    telling = [task for task in tasks if _above(task, "plain", metric)]
    lines = [
        "- Plain is told from chance (95 %) on "
        f"**{_count(telling, tasks)}**: {_names(telling)}. On the others the model itself may "
        "guess, and a part that guesses too is as good: those tasks say nothing of prototypes."
    ]
    for name in PARTS:
        figures = {task["title"]: task["predictors"][name][metric] for task in tasks}
        inside = [title for title, of in figures.items() if _inside(of, band)]
        outside = [title for title, of in figures.items() if _surely(of, band)]
        kept = [task for task in telling if _above(task, name, metric)]
        mean = ours["mean"][name]
        lines.append(
            f"- **{STYLES[name][1].capitalize()}: within ±{band:g} % on {_count(inside, tasks)}** "
            f"({_listed(inside)}), and outside of it with the whole 95 % interval on "
            f"{len(outside)} ({_listed(outside)}). Of the {len(telling)} that tell, it is above "
            f"chance on {len(kept)} ({_names(kept)}). Mean of all eight {mean['value']:.1%}, "
            f"{_change(mean)}."
        )
    errors = [
        of["change_stderr"]
        for task in tasks
        if (of := task["predictors"][PARTS[0]][metric])["change_stderr"] is not None
    ]
    lines.append(
        f"- The standard errors of these changes are {min(errors):.0f} to {max(errors):.0f} %, so "
        f"that none of these questions can show a part to be *within* ±{band:g} %: inside or "
        "outside of the band is where the figure fell, and only what is outside with its "
        "whole interval is a finding."
    )
    return lines


def _parts_compared(
    apart: dict[str, dict[str, float]], telling: list[dict[str, Any]], chance: float
) -> list[str]:
    """Say which part answers more, on all tasks and on those that tell."""
    mean = apart["mean"]
    which = "which part answers more is not told"
    if mean["value"] > SURE * mean["stderr"]:
        which = "the residual alone answers more than the prototypes alone"
    elif mean["value"] < -SURE * mean["stderr"]:
        which = "the prototypes alone answer more than the residual alone"
    values, errors = (
        [apart[task["task"]][name] for task in telling] for name in ("value", "stderr")
    )
    some = {
        "value": sum(values) / max(1, len(values)),
        "stderr": sum(error**2 for error in errors) ** 0.5 / max(1, len(values)),
    }
    return [
        f"- Residual less prototypes, mean of all eight: {_points(mean)} points; of the "
        f"{len(telling)} that tell, {_points(some)}. **On all eight, {which}.** Of the tasks where "
        "plain guesses, a part's gain is no knowledge of the model's.",
        f"- Chance has a mean of {chance:.1%}: the means above are to be read beside that.",
    ]


def _chance(tasks: list[dict[str, Any]]) -> float:
    return sum(task["chance"] for task in tasks) / len(tasks)


def _above(task: dict[str, Any], name: str, metric: str) -> bool:
    """Say whether a predictor is above chance with 95 %."""
    of = task["predictors"][name][metric]
    return of["value"] - SURE * of["stderr"] > task["chance"]


def _inside(of: dict[str, Any], band: float) -> bool:
    return of["change"] is not None and abs(of["change"]) <= band


def _surely(of: dict[str, Any], band: float) -> bool:
    """Say whether the 95 % interval of a change has nothing in common with the band."""
    return of["change"] is not None and abs(of["change"]) - SURE * of["change_stderr"] > band


def _count(some: list[Any], every: list[Any]) -> str:
    return f"{len(some)} of {len(every)}"


def _names(tasks: list[dict[str, Any]]) -> str:
    return _listed([task["title"] for task in tasks])


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def _change(of: dict[str, Any]) -> str:
    if of["change"] is None:
        return "no change can be said"
    return f"{of['change']:+.0f} ± {of['change_stderr']:.0f} %"


def _figure(of: dict[str, Any]) -> str:
    return f"{of['value']:.1%} ± {of['stderr']:.1%}"


def _points(of: dict[str, Any]) -> str:
    return f"{100 * of['value']:+.1f} ± {100 * of['stderr']:.1f}"


def _row(task: dict[str, Any], metric: str) -> str:
    figures = {name: of[metric] for name, of in task["predictors"].items()}
    parts = " | ".join(f"{_figure(figures[name])} ({_change(figures[name])})" for name in PARTS)
    guesses = f"{task['chance']:.1%} | {task['most_common']:.1%}"
    return f"| {task['title']} | {guesses} | {_figure(figures['plain'])} | {parts} |"


def _mean_row(mean: dict[str, Any], chance: float) -> str:
    parts = " | ".join(f"{_figure(mean[name])} ({_change(mean[name])})" for name in PARTS)
    return f"| **mean** | {chance:.1%} |  | {_figure(mean['plain'])} | {parts} |"


def _base(result: dict[str, Any]) -> list[str]:
    """Return the table of the model before fine-tuning."""
    metric = result["ours"]["metric"]
    lines = [
        "The same questions asked of SmolLM2-135M-Instruct as its GGUF file (Q4_1) has it, and "
        "what fine-tuning on the sample changed, in points, question by question.",
        "",
        *table_head(f"| task | {metric} | acc_norm | fine-tuning changed |"),
    ]
    for task in result["base"]["tasks"]:
        plain = task["predictors"]["plain"]
        normed = _figure(plain["acc_norm"]) if "acc_norm" in plain else "–"
        moved = result["differences"]["fine_tuning"][task["task"]]
        lines.append(
            f"| {task['title']} | {_figure(plain[metric])} | {normed} | {_points(moved)} |"
        )
    mean = result["base"]["mean"]["plain"]
    moved = result["differences"]["fine_tuning"]["mean"]
    lines.append(f"| **mean** | {_figure(mean)} |  | {_points(moved)} |")
    return lines


def _published(found: dict[str, Any]) -> str:
    figures = ", ".join(f"{name} {value}" for name, value in found["percent"].items())
    return (
        f"Published, in %: {figures} ({found['source']}). The card does not name the metric, and "
        "that harness has prompts of its own; its MMLU scores the text of answers and not their "
        "letters, another task than the one here. It is of the weights in bfloat16 and of all "
        "questions; ours are 4-bit weights."
    )


if __name__ == "__main__":
    raise SystemExit(main())
