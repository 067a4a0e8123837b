"""Write docs/results/prototype_mixer_glue.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.shared.pages import page_options, publish, read_results, runs_made, table_head
from prismlm.eval.glue.study import RATES

TITLES = ("CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI", "QQP", "QNLI", "MNLI", "MNLI-MM")
TABLE_10 = {
    "LLaMA": (36.4, 91.2, 84.9, 85.8, 60.1, 56.3, 85.9, 86.4, 80.5, 79.7),
    "Mamba": (30.6, 89.1, 82.3, 79.4, 55.8, 56.3, 82.7, 82.2, 75.1, 74.9),
    "DeltaNet": (8.9, 85.5, 81.4, 75.7, 56.1, 56.3, 81.2, 80.1, 71.6, 72.5),
    "ProtoT": (29.3, 89.8, 81.7, 73.3, 54.5, 54.9, 83.6, 82.6, 75.4, 76.0),
}
KINDS = {
    "llama": "LLaMA", "mamba": "Mamba", "mamba2": "Mamba", "prismlm_deltanet": "DeltaNet",
    "prismlm_protot": "ProtoT",
}  # fmt: skip
FEW = 0.1  # of the sets: where no more than that gain by training, chance would do as much
BAND = 2.0  # points within which two means are called on par

Rows = dict[str, dict[str, Any]]


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    found = read_results(given.results / "prototype_mixer" / "glue", "prototype_mixer.glue")
    page = given.results / "prototype_mixer_glue.md"
    return publish({page: render(found)}, check=given.check)


def render(models: list[dict[str, Any]]) -> str:
    """Return the page."""
    rows = {model["model"]: dev_rows(model) for model in models}
    lines = [
        "# GLUE, fine-tuned",
        "",
        "Generated from `prototype_mixer/glue/` by `python -m "
        "benchmarks.prototype_mixer.render_glue`; `benchmarks/prototype_mixer/glue.py` writes that "
        "and says how. Source: ProtoT, A.4 and Table 10.",
        "",
        *_written_by(models[0]),
        *_figures(models, rows),
        *_source(),
        "## What the source claims",
        "",
        *claims(models, rows),
        "",
        runs_made([model["environment"] for model in models]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _written_by(model: dict[str, Any]) -> list[str]:
    """Return a model's command by what its file says, where that is all of it."""
    if model["tried"] and "searched_on" not in model:
        return []
    rows = list(dev_rows(model).values())
    words = f"python -m benchmarks.prototype_mixer.glue --model {model['model']}=DIR --data DIR"
    cut = {r["train"]["rows"] for r in rows if r["train"]["rows"] < r["train"]["there"]}
    limit = model.get("limit")
    for name, value in (
        ("limit", limit),
        ("large-limit", None if limit else max(cut, default=None)),
        ("dev-limit", model.get("dev_limit")),
        ("search-limit", model.get("searched_on")),
    ):
        words += f" --{name} {value}" if value else ""
    if model["tried"]:
        rates = sorted({one["learning_rate"] for one in model["tried"]})
        words += f" --search-rates {' '.join(f'{rate:g}' for rate in rates)}"
    else:
        words += f" --learning-rate {model['learning_rate']:g}"
    for option, arm in (("seeds", "fine_tuned"), ("scratch-seeds", "from_scratch")):
        seeds = sorted({seed for row in rows if row[arm] for seed in row[arm]["seeds"]})
        words += f" --{option} {' '.join(map(str, seeds))}"
    return [f"    {words}", ""]


def dev_rows(model: dict[str, Any]) -> Rows:
    """Return a model's rows of dev sets by title."""
    return {row["title"]: row for row in model["tasks"] if row["split"].startswith("dev")}


def _figures(models: list[dict[str, Any]], rows: dict[str, Rows]) -> list[str]:
    lines = [
        f"The headline metric of each dev set × 100: mean over {_seeds(rows, 'fine_tuned')}, in "
        "brackets the 95 % interval over dev rows; after the slash the same fine-tuning of the "
        f"model without its training ({_seeds(rows, 'from_scratch')}). "
        "Constant is the best answer that is the same for all rows: the majority's share by "
        "accuracy, always 1 by F1, 0 where answers are correlated.",
        "",
    ]
    for model in models:
        chosen = f"learning rate {model['learning_rate']:g}, warm-up {model['warmup']:g}"
        lines.append(
            f"- `{model['model']}`: {model['parameters']:,} parameters, {chosen} "
            f"({_search(model)}), up to {model['epochs']} epochs of {model['batch_size']} rows "
            "a step"
        )
    kinds = {KINDS.get(model["type"]) for model in models}
    missing = [kind for kind in TABLE_10 if kind not in kinds]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    names = " | ".join(f"`{name}`" for name in rows)
    lines += ["", *table_head(f"| task | metric | trained on | dev rows | constant | {names} |")]
    for title in TITLES:
        there = [found[title] for found in rows.values() if title in found]
        if not there:
            lines.append(f"| {title} | not measured: no such dev set was there |")
            continue
        first = there[0]
        metric = first["metrics"][0]
        cells = [title, metric, _share(first["train"]), _share(first["measured"])]
        cells.append(f"{_constant(first):.1f}")
        cells += [_cell(found.get(title), metric) for found in rows.values()]
        lines.append(f"| {' | '.join(cells)} |")
    shared = _shared(rows)
    if len(shared) > 1:
        means = [_mean_cell(found, shared) for found in rows.values()]
        constant = np.mean([_constant(next(iter(rows.values()))[title]) for title in shared])
        lines.append(f"| mean of {len(shared)} | | | | {constant:.1f} | {' | '.join(means)} |")
    return [*lines, ""]


def _search(model: dict[str, Any]) -> str:
    """Say where rate and warm-up come from, and how much was tried."""
    tried, rows = len(model["tried"]), model.get("searched_on")
    on = f", on {rows:,} rows of SST-2 and of MNLI" if rows else ""
    end = (
        "; the end of the source's grid" if model["learning_rate"] in (RATES[0], RATES[-1]) else ""
    )
    return f"{model['rate_from']}, best of {tried}{on}{end}" if tried else model["rate_from"]


def _seeds(rows: dict[str, Rows], arm: str) -> str:
    """Say which seeds all sets were run with."""
    arms = [row[arm]["seeds"] for found in rows.values() for row in found.values() if row[arm]]
    shared = sorted(set.intersection(*map(set, arms))) if arms else []
    return f"{'seed' if len(shared) == 1 else 'seeds'} {', '.join(map(str, shared)) or '–'}"


def _cell(row: dict[str, Any] | None, metric: str) -> str:
    if row is None or not row["fine_tuned"]:
        return "–"
    found, fresh = row["fine_tuned"], row["from_scratch"]
    scratch = f"{100 * fresh['mean'][metric]:.1f}" if fresh else "–"
    spread = f"{100 * found['low']:.1f} to {100 * found['high']:.1f}"
    return f"{100 * found['mean'][metric]:.1f} ({spread}) / {scratch}"


def _mean_cell(found: Rows, titles: list[str]) -> str:
    """Return the mean over sets, and between which values those of single seeds lie."""
    seeds = _by_seed(found, titles)
    fresh = "–"
    if all(found[title]["from_scratch"] for title in titles):
        fresh = f"{_by_seed(found, titles, 'from_scratch').mean():.1f}"
    return f"{seeds.mean():.1f} (seeds {seeds.min():.1f} to {seeds.max():.1f}) / {fresh}"


def _constant(row: dict[str, Any]) -> float:
    return 100 * row["constant"][row["metrics"][0]]


def _share(rows: dict[str, Any]) -> str:
    whole = rows["rows"] == rows["of"]
    return f"{rows['rows']:,}" if whole else f"{rows['rows']:,} of {rows['of']:,}"


def _source() -> list[str]:
    lines = [
        "## The source's figures",
        "",
        "Table 10: its own, larger models, all rows, three seeds.",
        "",
        *table_head(f"| model | {' | '.join(TITLES)} | mean |"),
    ]
    for name, figures in TABLE_10.items():
        cells = [*(f"{figure:.1f}" for figure in figures), f"{np.mean(figures):.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def claims(models: list[dict[str, Any]], rows: dict[str, Rows]) -> list[str]:
    """Return a line for each claim: shown, not shown or the opposite.

    Means are over the dev sets that all models have, seed by seed. A difference is shown where it
    has its sign in every pair of seeds.
    """
    kinds = {KINDS[m["type"]]: m["model"] for m in models if m["type"] in KINDS}
    shared = _shared(rows)
    means = {kind: _by_seed(rows[name], shared) for kind, name in kinds.items()}
    gains = {name: [t for t, row in found.items() if _gains(row)] for name, found in rows.items()}
    lines = [f"Means over {', '.join(shared)}; a band of {BAND:g} points is on par.", ""]
    gained, every = (sum(map(len, of.values())) for of in (gains, rows))
    if gained <= FEW * every:
        where = f"{gained} of {every} sets" if gained else "no set"
        brought, elsewhere = ("next to nothing", "elsewhere, ") if gained else ("nothing", "")
        lines += [
            f"**In {where} does a model gain by its training**: {elsewhere}fine-tuned from new "
            f"weights, it does as well. What follows compares models that bring {brought} to these "
            "tasks, so that neither answer says anything of the architectures.",
            "",
        ]
    others = [kind for kind in means if kind != "LLaMA"]
    if "LLaMA" in means:
        lines += [f"- LLaMA is above {o}: {_above(means['LLaMA'], means[o])}" for o in others]
    if "ProtoT" in means:
        linear = [kind for kind in others if kind != "ProtoT"]
        lines += [
            f"- ProtoT is on par with {o}: {_on_par(means['ProtoT'], means[o])}" for o in linear
        ]
    for title in ("MNLI", "MNLI-MM"):
        if title in shared and "ProtoT" in means and len(means) > 2:
            order = sorted(kinds, key=lambda kind: -_by_seed(rows[kinds[kind]], [title]).mean())
            place = order.index("ProtoT") + 1
            said = "shown" if place == 2 else "not shown"
            where = f"it is number {place} of {len(order)}"
            lines.append(f"- ProtoT is second on {title}: {said}, {where}")
            near = [kind for kind in order if _overlap(rows, kinds, title, kind)]
            if near:
                lines.append(f"- Its interval on {title} overlaps that of {', '.join(near)}")
    for name, gained in gains.items():
        lines.append(
            f"- `{name}`, its training helps (control): the interval lies above that from scratch "
            f"in {len(gained)} of {len(rows[name])} sets"
            f"{': ' + ', '.join(gained) if gained else ''}"
        )
    return lines if kinds else [*lines, "None of the source's architectures was measured."]


def _overlap(rows: dict[str, Rows], kinds: dict[str, str], title: str, kind: str) -> bool:
    one, other = (rows[kinds[name]][title]["fine_tuned"] for name in ("ProtoT", kind))
    return kind != "ProtoT" and one["low"] <= other["high"] and other["low"] <= one["high"]


def _shared(rows: dict[str, Rows]) -> list[str]:
    return [title for title in TITLES if all(title in found for found in rows.values())]


def _by_seed(rows: Rows, titles: list[str], arm: str = "fine_tuned") -> np.ndarray:
    values = [rows[title][arm]["values"][rows[title]["metrics"][0]] for title in titles]
    return 100 * np.mean(values, axis=0)


def _above(one: np.ndarray, other: np.ndarray) -> str:
    gap = f"by {one.mean() - other.mean():+.1f} points"
    if one.min() > other.max():
        return f"shown, {gap}"
    return f"{'the opposite' if one.max() < other.min() else 'not shown'}, {gap}"


def _on_par(one: np.ndarray, other: np.ndarray) -> str:
    gap = one.mean() - other.mean()
    if abs(gap) <= BAND:
        return f"shown, {gap:+.1f} points"
    apart = one.max() < other.min() or one.min() > other.max()
    which = "the opposite, it is above" if gap > 0 else "the opposite, it is below"
    return f"{which if apart else 'not shown'}, {gap:+.1f} points"


def _gains(row: dict[str, Any]) -> bool:
    found, fresh = row["fine_tuned"], row["from_scratch"]
    return bool(found and fresh) and found["low"] > fresh["high"]


if __name__ == "__main__":
    raise SystemExit(main())
