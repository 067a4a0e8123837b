"""What ``control.md`` says of controllers, suppression and removal; a missing JSON is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.shared.pages import ranged

Row = dict[str, Any]
METHODS = {
    "controller": "**controller**",
    "random": "as many random prototypes",
    "probe": "scales of principal directions of z",
    "lora": "LoRA, rank 1, last MLP",
}
WAYS = {
    "before": "nothing",
    "suppressed": "**scales of prototypes**",
    "random prototypes": "as many random prototypes",
    "prompt": "prompt “Do not mention …”",
    "logit bias": "a logit bias",
    "largest logit bias": "a logit bias of 32",
    "all removed": "all that mark it removed",
    "random removed": "as many random ones removed",
}
GOAL, COST = 0.9, 0.02  # share of the behaviour removed, growth of perplexity
KINDS, BIASED = ("held_out", "taught"), ("logit bias", "largest logit bias")

ESTIMATES = {
    "evidence": "**evidence**",
    "influence": "**influence**",
    "bm25": "BM25",
    "bm25_sharpened": "sharpened BM25",
    "own_document": "own document",
    "zero": "no change",
}
OF_ESTIMATES = {
    "explained": ".0%",
    "rank_own": ".2f",
    "rank_in_set": ".2f",
    "rank_all": ".2f",
    "slope": ".2f",
    "coverage": ".0%",
    "coverage_own": ".0%",
    "width_own": ".2f",
}

WORDS = {
    "random": "as many random prototypes",
    "probe": "scales of principal directions",
    "lora": "LoRA of rank 1",
}


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables of each section whose JSON is there."""
    calibrated = read("control_calibrate.json", optional=True)
    suppressed = read("control_suppress.json", optional=True)
    removal = read("control_what_if.json", optional=True)
    return {
        "calibrated": calibrated and of_calibration(calibrated),
        "suppressed": suppressed and of_suppression(suppressed),
        "removal": removal and of_removal(removal),
    }


def of_calibration(result: Row) -> Row:
    """Return changes of accuracy in points, by task and method, and their means over tasks."""
    tasks = result["tasks"]
    changes = {name: {m: changed(task, m) for m in METHODS} for name, task in tasks.items()}
    telling = [name for name, task in tasks.items() if tells(task)]
    means = {m: mean_of([changes[name][m] for name in tasks]) for m in METHODS}
    rows = [
        (
            tasks[name]["title"] + ("" if name in telling else " †"),
            f"{100 * answered(tasks[name]['before']).mean():.1f}",
            *(interval(changes[name][m]) for m in METHODS),
            spread([run["parameters"] for run in runs_of(tasks[name], "controller")]),
        )
        for name in tasks
    ]
    others = [m for m in METHODS if m != "controller"]
    less = {
        m: mean_of([changes[name]["controller"] - changes[name][m] for name in tasks])
        for m in others
    }
    before = np.mean([answered(task["before"]).mean() for task in tasks.values()])
    rows.append(("**mean**", f"{100 * before:.1f}", *(shown(*means[m]) for m in METHODS), ""))
    gain, error = means["controller"]
    told = mean_of([changes[name]["controller"] for name in telling])
    beaten = all(mean > 1.96 * spread_ for mean, spread_ in less.values())
    return {
        "result": result,
        "rows": rows,
        "telling": [tasks[name]["title"] for name in telling],
        "told": shown(*told, bold=False),
        "less": [(METHODS[m], shown(*less[m])) for m in others],
        "works": bool(gain > 1.96 * error and beaten),
        "beaten": [WORDS[m] for m, (mean, spread_) in less.items() if mean > 1.96 * spread_],
        "unbeaten": [
            f"{WORDS[m]} ({shown(*means[m], bold=False)})"
            for m, (mean, spread_) in less.items()
            if mean <= 1.96 * spread_
        ],
        "gain": shown(gain, error, bold=False),
        "most": max(tasks, key=lambda name: changes[name]["controller"].mean()),
        "after_most": after_most(tasks, changes),
        "without_most": shown(
            *mean_of(sorted((changes[name]["controller"] for name in tasks), key=np.mean)[:-1]),
            bold=False,
        ),
        "reached": bool(told[0] >= 3),
        "perplexity": [(METHODS[m], *perplexities(tasks, m)) for m in METHODS],
        "plain": next(iter(tasks.values()))["perplexity"],
        "shown": shown,
    }


def after_most(tasks: dict[str, Row], changes: dict[str, Row]) -> float:
    """Return the accuracy under a controller, in per cent, of the task that changes most."""
    most = max(tasks, key=lambda name: changes[name]["controller"].mean())
    return float(100 * answered(tasks[most]["before"]).mean() + changes[most]["controller"].mean())


def runs_of(task: Row, method: str) -> list[Row]:
    """Return a method's runs, one a seed."""
    return [run for run in task["runs"] if run["method"] == method]


def changed(task: Row, method: str) -> np.ndarray:
    """Return the change of each question in points, a mean over draws."""
    right = np.mean([answered(run["right"]) for run in runs_of(task, method)], axis=0)
    return 100 * (right - answered(task["before"]))


def answered(digits: str) -> np.ndarray:
    """Return 1 for each question answered rightly, else 0."""
    return np.array([int(digit) for digit in digits])


def tells(task: Row) -> bool:
    """Return whether the model without a change beats chance by two standard errors."""
    before = answered(task["before"])
    return bool(before.mean() > task["chance"] + 2 * before.std() / len(before) ** 0.5)


def mean_of(columns: list[np.ndarray]) -> tuple[float, float]:
    """Return the mean over tasks and its standard error over their questions."""
    errors = [column.std(ddof=1) / len(column) ** 0.5 for column in columns]
    mean = float(np.mean([column.mean() for column in columns]))
    return mean, float(np.linalg.norm(errors) / len(columns))


def interval(column: np.ndarray) -> str:
    """Return a mean with its 95 % interval."""
    return shown(*mean_of([column]))


def shown(mean: float, error: float, *, bold: bool = True) -> str:
    """Return a figure with its 95 % interval, bold where that excludes 0."""
    low, high = mean - 1.96 * error, mean + 1.96 * error
    text = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
    return f"**{text}**" if bold and (low > 0 or high < 0) else text


def spread(values: list[int]) -> str:
    """Return the least and the most."""
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def perplexities(tasks: dict[str, Row], method: str) -> tuple[str, str]:
    """Return the mean and the largest change of perplexity over tasks and draws, in per cent."""
    changes = [
        100 * (run["perplexity"] / task["perplexity"] - 1)
        for task in tasks.values()
        for run in runs_of(task, method)
    ]
    return f"{np.mean(changes):+.1f} %", f"{max(changes):+.1f} %"


def of_removal(result: Row) -> Row:
    """Return the table of estimates and controls, and what the section begins with."""
    methods, ahead = result["methods"], result["ahead"]
    controls = [name for name in ESTIMATES if name not in ("evidence", "influence", "zero")]
    beaten = {n: [k for k, value in ahead[n].items() if value["low"] > 0] for n in controls}
    return {
        "result": result,
        "rows": [
            (
                title,
                *(ranged(methods[name][key], "value", form) for key, form in OF_ESTIMATES.items()),
            )
            for name, title in ESTIMATES.items()
        ],
        "works": {"explained", "rank_all"} <= set(beaten["bm25"]),
        "ahead": {
            key: " and ".join(ESTIMATES[n] for n in controls if key in beaten[n]) or "no control"
            for key in ("explained", "rank_all")
        },
        "less": [
            (ESTIMATES[name], *(ranged(value, "value", "+.2f") for value in ahead[name].values()))
            for name in controls
        ],
    }


def of_suppression(result: Row) -> Row:
    """Return the tables of each behaviour."""
    behaviours = {name: of_behaviour(result, name) for name in ("fact", "topic")}
    return behaviours | {
        "result": result,
        "questions": result["tasks"]["questions"],
        "plain": f"{100 * result['tasks']['mean']['plain']['value']:.1f}",
        "points": [
            (
                name,
                "all removed" if point["weight"] is None else f"{point['weight']:g}",
                len(point["scales"]),
                f"{point['turned']:.1f}",
                f"{100 * point['behaviour']:.0f} %",
                f"{100 * point['cost']:+.2f} %",
            )
            for name in behaviours
            for point in result[name]["frontier"]
        ],
    }


def of_behaviour(result: Row, name: str) -> Row:
    """Return the rows of one behaviour: ways to suppress it, and what they cost."""
    own, tasks = result[name], result["tasks"]["mean"]
    outcomes, plain = {one["name"]: one for one in own["outcomes"]}, 100 * tasks["plain"]["value"]
    scales = own["ways"]["suppressed"]["scales"]
    points = [one for one in own["frontier"] if one["weight"] is not None and one["cost"] <= COST]
    fitted = [one["behaviour"] for one in points]
    rows = []
    for key, one in outcomes.items():
        task = tasks.get(f"{name}: {key}")
        costs = ["" if key == "before" else percent(one[kind], "+.2f") for kind in KINDS]
        change = task and shown(plain * task["change"] / 100, plain * task["change_stderr"] / 100)
        rows.append((WAYS[key], percent(one["behaviour"], ".1f"), *costs, change or ""))
    before, after = outcomes["before"], outcomes["suppressed"]
    shares = [100 * one["behaviour"]["value"] for one in (before, after)]
    removed = 1 - shares[1] / shares[0]
    growth = max(after[kind]["value"] for kind in KINDS)
    met = removed >= GOAL and growth <= COST
    return own | {
        "rows": rows,
        "words": ", ".join(word.strip() for word in own["marked"]),
        "rivals": " and ".join(
            WAYS[key]
            for key, one in outcomes.items()
            if key in BIASED
            and one["behaviour"]["value"] <= after["behaviour"]["value"]
            and max(one[kind]["value"] for kind in KINDS) <= COST
        ),
        "later": next(
            (one["environment"]["commit"] for one in own["outcomes"] if "environment" in one), ""
        ),
        "turned": len(scales),
        "removed_all": not any(s for _, s in scales),
        "fitted": f"{100 * min(fitted):.0f} %" if fitted else "all",
        "answer": (
            f"{shares[0]:.0f} % → {shares[1]:.0f} % of sampled answers at "
            f"{100 * growth:+.2f} % of perplexity ({'met' if met else 'goal missed'})"
        ),
        "wordings": [
            (row["question"], *(percent(row[key], ".0f") for key in ("before", "suppressed")))
            for row in own["by_prompt"]
        ],
    }


def percent(figure: Row, form: str) -> str:
    """Return a share in per cent with its interval."""
    value, low, high = (format(100 * figure[key], form) for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"
