"""What ``control.md`` says of controllers, suppression and removal; a missing JSON is left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Row = dict[str, Any]
METHODS = {
    "controller": "**controller**",
    "random": "random prototypes",
    "probe": "principal directions",
    "lora": "LoRA",
}
WAYS = {
    "before": "nothing",
    "suppressed": "**scales**",
    "random prototypes": "random prototypes",
    "prompt": "prompt",
    "logit bias": "logit bias",
    "largest logit bias": "logit bias of 32",
}
GOAL, COST = 0.9, 0.02  # share of the behaviour removed, growth of perplexity
KINDS, BIASED = ("held_out", "taught"), ("logit bias", "largest logit bias")

ESTIMATES = {
    "evidence": "**evidence**",
    "influence": "**influence**",
    "bm25": "BM25",
    "bm25_sharpened": "sharpened BM25",
    "ekfac": "EK-FAC",
    "ekfac_logits": "EK-FAC, from logits",
    "evidence_sum": "evidence, summed",
    "own_document": "own document",
    "zero": "no change",
}
# No controls: our own, what another form would give, and nothing.
OWN = ("evidence", "influence", "evidence_sum", "ekfac_logits", "zero")
SHARES = ("explained", "coverage", "coverage_own")
RANKS = ("rank_own", "rank_all")

WORDS = {
    "random": "random prototypes",
    "probe": "principal directions",
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
        )
        for name in tasks
    ]
    others = [m for m in METHODS if m != "controller"]
    less = {
        m: mean_of([changes[name]["controller"] - changes[name][m] for name in tasks])
        for m in others
    }
    before = np.mean([answered(task["before"]).mean() for task in tasks.values()])
    rows.append(("**mean**", f"{100 * before:.1f}", *(shown(*means[m]) for m in METHODS)))
    gain, error = means["controller"]
    told = mean_of([changes[name]["controller"] for name in telling])
    beaten = all(mean > 1.96 * spread_ for mean, spread_ in less.values())
    return {
        "result": result,
        "rows": rows,
        "telling": [tasks[name]["title"] for name in telling],
        "told": shown(*told, bold=False),
        "methods": [
            (METHODS[m], shown(*less[m]) if m in less else "", *perplexities(tasks, m))
            for m in METHODS
        ],
        "turned": spread(
            [run["parameters"] for task in tasks.values() for run in runs_of(task, "controller")]
        ),
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
        "plain": next(iter(tasks.values()))["perplexity"],
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
    half = 1.96 * error
    text = f"{mean:+.1f} ±{half:.1f}"
    return f"**{text}**" if bold and abs(mean) > half else text


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
    names = [name for name in ESTIMATES if name in methods]
    controls = [name for name in names if name not in OWN]

    def listed(key: str, decided: Callable[[Row], bool]) -> str:
        """Return the controls whose difference from the evidence is decided so."""
        of = [name for name in controls if decided(ahead[name][key])]
        shares = {n: f" ({methods[n]['explained']['value']:.0%})" for n in of if key == "explained"}
        return ", ".join(ESTIMATES[name] + shares.get(name, "") for name in of) or "no control"

    return {
        "result": result,
        "rows": [(ESTIMATES[name], *cells_of(methods[name])) for name in names],
        "ahead": listed("explained", lambda figure: figure["low"] > 0),
        "undecided": listed("explained", lambda figure: figure["low"] <= 0),
        "behind": {key: listed(key, lambda figure: figure["high"] < 0) for key in RANKS},
        # Forms were chosen with nine models of the first partition, which has ten.
        "later": result["models"] - 10,
        "less": [
            (ESTIMATES[name], *(spanned(ahead[name][k], "+.2f") for k in ("explained", *RANKS)))
            for name in controls
        ],
    }


def cells_of(method: Row) -> list[str]:
    """Return a method's cells: shares in per cent, ranks, slope and width."""
    shares = {key: {name: 100 * value for name, value in method[key].items()} for key in SHARES}
    return [
        spanned(shares["explained"], ".0f"),
        # Equal estimates have no rank.
        *(spanned(method[key], ".2f") if any(method[key].values()) else "–" for key in RANKS),
        f"{method['slope']['value']:.2f}",
        spanned(shares["coverage"], ".0f"),
        spanned(shares["coverage_own"], ".0f"),
        f"{method['width_own']['value']:.2f}",
    ]


def spanned(figure: Row, form: str) -> str:
    """Return a figure with its interval, shorter than ``ranged``."""
    value, low, high = (format(figure[name], form) for name in ("value", "low", "high"))
    return f"{value} ({low}…{high})" if "+" in form else f"{value} ({low}–{high})"


def of_suppression(result: Row) -> Row:
    """Return the table of both behaviours, and what each begins with."""
    behaviours = {name: of_behaviour(result, name) for name in ("fact", "topic")}
    return behaviours | {
        "result": result,
        "questions": result["tasks"]["questions"],
        "plain": f"{100 * result['tasks']['mean']['plain']['value']:.1f}",
        "rows": [
            (f"{name}: {row[0]}", *row[1:])
            for name in behaviours
            for row in behaviours[name]["rows"]
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
        "wordings": ", ".join(
            f"{row['before']['value']:.0%} → {row['suppressed']['value']:.0%}"
            for row in own["by_prompt"]
        ),
    }


def percent(figure: Row, form: str) -> str:
    """Return a share in per cent with its interval."""
    return spanned({name: 100 * figure[name] for name in ("value", "low", "high")}, form)
