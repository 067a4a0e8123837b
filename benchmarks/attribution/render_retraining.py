"""Write docs/results/retraining.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.attribution.judges.passages import mean_with_error
from benchmarks.attribution.tables_of_lds import (
    MEANING,
    PRODUCT,
    datamodels,
    name_of,
    paired,
    product_name,
    rest_of_choices,
    signed,
    temperatures,
)
from benchmarks.shared.pages import page_options, publish, read_result, runs_made, table_head
from prismlm.explain.positions import TEMPERATURE

LDS_GOAL = 0.20
TIME_GOAL = 0.01
FEW = 20
PLANNED = {"models": 100, "predictions": 20, "seeds": 3}
GRADIENTS = ("last-layer K-FAC", "gradient cosine", "gradient, diagonal Fisher")


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    found = [
        read_result(given.results / f"attribution_{name}.json", f"attribution.{script}")
        for name, script in (
            ("datamodels", "datamodels"),
            ("bergson", "judged_by_bergson"),
            ("removed", "judged_by_bergson"),
            ("forgetting", "forgetting"),
            ("ekfac_time", "ekfac_time"),
        )
    ]
    return publish({given.results / "retraining.md": render(*found)}, check=given.check)


def render(
    lds: dict[str, Any],
    tool: dict[str, Any],
    more: dict[str, Any],
    lost: dict[str, Any],
    real: dict[str, Any],
) -> str:
    """Return the page."""
    chosen = best_choice(lds)
    head = _head(lds, tool, more, lost, real)
    tool = _with_more(tool, more)
    lines = [
        *head,
        "## In short",
        "",
        *_short(lds, tool, lost, chosen),
        *_time_of_real(real),
        *_unfinished(lds, tool, lost),
        "",
        "## Linear datamodeling score",
        "",
        "Of each prediction, the rank correlation over the models: the scores of the documents "
        "that a model was trained on, summed, with the log-probability that it gives. ± counts "
        "predictions and models, drawn again 200 times; the difference is paired. What is free in "
        "evidence by position was chosen on one half of the predictions; *other half* is the one "
        "that it was not chosen on, ± over predictions.",
        "",
        *datamodels(lds, chosen),
        "",
        "`explain` reads the cells that an index writes. Evidence by position is the reference in "
        "memory: it reads every position of the documents, after "
        f"{lds['seconds to read the documents']:.0f} s to read them twice and to find centres.",
        "",
        "### What the equation leaves open",
        "",
        "LDS of all predictions; **bold** was best on the half to choose on. *Random states*: as "
        "prototypes, in place of centres.",
        "",
        *temperatures(lds, chosen),
        "",
        *rest_of_choices(lds),
        "",
        "## Judged by Bergson",
        "",
        *_judged(lds, tool),
        "",
        "## Forgetting",
        "",
        f"The ten documents that a method names for each of {lost['predictions']} predictions are "
        f"taken away, {lost['together']} predictions to a training, which starts from scratch with "
        f"{len(lost['seeds'])} seed{'s' if len(lost['seeds']) != 1 else ''}: what the "
        "predictions lose in log-probability, in nats. What is taken away for the "
        "others is lost by each, whatever the method. ± over "
        "predictions.",
        "",
        *_forgetting(lost),
    ]
    return "\n".join(lines) + "\n"


def _with_more(tool: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return what Bergson judged, with the QLD of the predictions that it judged later."""
    methods = dict(tool["methods"])
    for name, later in more["methods"].items():
        each = [*methods[name]["qld"]["each"], *later["qld"]["each"]]
        methods[name] = methods[name] | {"qld": mean_with_error(np.array(each)) | {"each": each}}
    return tool | {"methods": methods}


def _head(
    lds: dict[str, Any],
    tool: dict[str, Any],
    more: dict[str, Any],
    lost: dict[str, Any],
    real: dict[str, Any],
) -> list[str]:
    removed = " ".join(f'"{name}"' for name in more["methods"])
    return [
        "# Retraining: does attribution foretell it?",
        "",
        "Generated from `attribution_datamodels.json`, `attribution_bergson.json`, "
        "`attribution_removed.json`, `attribution_forgetting.json` and "
        "`attribution_ekfac_time.json` by `python -m benchmarks.attribution.render_retraining`; "
        "the JSON by",
        "",
        "    python -m benchmarks.attribution.planted_model planted --facts 32 --epochs 1 --seed 1",
        "    python -m benchmarks.attribution.model_bank planted bank",
        "    python -m benchmarks.attribution.datamodels bank",
        f"    python -m benchmarks.attribution.judged_by_bergson bank {_said(tool, lost)[0]}",
        f"    python -m benchmarks.attribution.judged_by_bergson bank --own --ours {removed} --qld "
        f"{more['asked'][1]} --qld-from {more['asked'][0]} --removed {removed} --out "
        "docs/results/attribution_removed.json",
        f"    python -m benchmarks.attribution.forgetting bank {_said(tool, lost)[1]}",
        *(
            f"    python -m benchmarks.attribution.ekfac_time MODEL --documents "
            f"{one['ekfac']['documents']}"
            for one in real["runs"]
        ),
        "",
        runs_made([one["environment"] for one in (lds, tool, more, lost, *real["runs"])]),
        "",
        f"{lds['models']} Llamas of 0.6 million parameters, each trained from the same first "
        f"weights for four epochs on a random half of {lds['documents']:,} beginnings of 128 "
        f"tokens, all real text of the bundled sample. {lds['predictions']} held-out predictions "
        "are asked of each, and of the model that was trained on all of them, whose states, "
        "gradients and prototypes every method reads. Its prototypes are 256 centres of its "
        "states, 16 in use; they were not trained.",
        "",
    ]


def _said(tool: dict[str, Any], lost: dict[str, Any]) -> tuple[str, str]:
    ours = " ".join(f'"{name}"' for name in tool["methods"] if not name.startswith("Bergson"))
    removed = {name: one["qld"]["each"] for name, one in tool["methods"].items() if "qld" in one}
    words = [f"--ours {ours}"]
    if removed:
        quoted = " ".join(f'"{name}"' for name in removed)
        words.append(f"--qld {len(next(iter(removed.values())))} --removed {quoted}")
    named = " ".join(f'"{name}"' for name in lost["methods"])
    counts = f"--predictions {lost['predictions']} --together {lost['together']}"
    return " ".join(words), f"{counts} --methods {named}"


def _unfinished(lds: dict[str, Any], tool: dict[str, Any], lost: dict[str, Any]) -> list[str]:
    parts = [
        f"{there} of {planned} {what}"
        for there, planned, what in (
            (lds["models"], PLANNED["models"], "models"),
            (tool["models"], PLANNED["models"], "models before Bergson"),
            (lost["predictions"], PLANNED["predictions"], "predictions for forgetting"),
            (len(lost["seeds"]), PLANNED["seeds"], "seeds for forgetting"),
        )
        if there < planned
    ]
    return [f"- **Not finished**: {', '.join(parts)}."] if parts else []


def _asked(tool: dict[str, Any]) -> str:
    counts: dict[int, list[str]] = {}
    for name, one in tool["methods"].items():
        if "qld" in one:
            counts.setdefault(len(one["qld"]["each"]), []).append(name_of(name))
    if not counts:
        return ""
    told = [f"the first {count} for {' and '.join(names)}" for count, names in counts.items()]
    few = ", too few to tell methods apart" if min(counts) < FEW else ""
    return f", of QLD {', '.join(told)}{few}"


def _same_figure(lds: dict[str, Any], tool: dict[str, Any]) -> str:
    shared = [name for name in tool["methods"] if name in lds["methods"]]
    apart = max(
        abs(tool["methods"][name]["lds"]["mean"] - lds["methods"][name]["all"]["mean"])
        for name in shared
    )
    return (
        f"Its LDS of our scores, over {tool['models']} models, is ours over {lds['models']} to "
        f"within {apart:.1g}."
    )


def best_choice(lds: dict[str, Any]) -> str:
    """Return the name of the evidence that did best on the half to choose on.

    Its controls are of the same equation, and none of those has the token read last.
    """
    methods = lds["methods"]
    tried = [name for name in methods if name.startswith("evidence") and "same=" not in name]
    return max(tried, key=lambda name: methods[name]["search"]["mean"])


def _short(
    lds: dict[str, Any], tool: dict[str, Any], lost: dict[str, Any], chosen: str
) -> list[str]:
    other = ~np.array(lds["searched"])
    own = lds["methods"][chosen]
    each = np.array(own["each"])[other]
    rivals = {name: lds["methods"][name]["each"] for name in GRADIENTS if name in lds["methods"]}
    rivals |= {n: m["lds"]["each"] for n, m in tool["methods"].items() if n.startswith("Bergson")}
    beaten = {name: paired(each, np.array(values)[other]) for name, values in rivals.items()}
    least = min(beaten, key=lambda name: beaten[name][0])
    against = paired(_lost(lost, PRODUCT), _lost(lost, "bm25"))
    return [
        f"- LDS **{own['report']['mean']:.3f}** ± {own['report']['error']:.3f} on the half that "
        f"nothing was chosen on ({own['all']['mean']:.3f} on all), goal {LDS_GOAL:.2f}: "
        f"{_verdict(own['report']['mean'] >= LDS_GOAL)}.",
        f"- Above every gradient method tried, on that half: the nearest is {MEANING[least]}; "
        f"{_above(beaten[least])}.",
        *_controls(lds, chosen),
        f"- Forgetting, by what `explain` names: {_lost(lost, PRODUCT).mean():.3f} nats, at least "
        f"as much as by BM25's ({_lost(lost, 'bm25').mean():.3f}): {_above(against)}.",
        *_tool_short(lds, tool),
    ]


def _controls(lds: dict[str, Any], chosen: str) -> list[str]:
    methods, temperature = lds["methods"], chosen.split()[1]
    names = {
        "counting the token": "count of the token",
        "the same equation with cells of random states": f"random states {temperature}",
        "over every position, without any prototype": f"evidence {temperature} cells=all",
    }
    parts = [
        f"{said} has {methods[name]['all']['mean']:.3f} (the best choice less it "
        f"{signed(paired(methods[chosen]['each'], methods[name]['each']))})"
        for said, name in names.items()
        if name in methods and name != chosen
    ]
    product = product_name(methods)
    own, rivals = methods[product], ("count of the token", "last-layer K-FAC")
    more = [name for name in rivals if methods[name]["all"]["mean"] > own["all"]["mean"]]
    kept = paired(methods[chosen]["each"], own["each"])
    return [
        f"- `explain` {_as_measured(product)}: "
        f"LDS **{own['all']['mean']:.3f}** on all, {own['report']['mean']:.3f} on that half, less "
        f"than the best choice by {signed(kept)} on all"
        + (f"; **below** {' and '.join(MEANING[name] for name in more)}." if more else "."),
        f"- Controls, on all predictions: {'; '.join(parts)}.",
    ]


def _as_measured(product: str) -> str:
    if product == PRODUCT:
        return (
            f"itself has T {TEMPERATURE:g}, and knows the text before and the token read last, of "
            "which each was weighed with both halves in view"
        )
    was = product.partition("=")[2]
    return f"was measured here before it knew the text before (T {was}), **not since**"


def _tool_short(lds: dict[str, Any], tool: dict[str, Any]) -> list[str]:
    methods = tool["methods"]
    own = PRODUCT if "qld" in methods.get(PRODUCT, {}) else _reference(methods)
    judge, words, rival = methods[own], methods["bm25"], methods["Bergson EK-FAC"]
    lines: list[str] = []
    for key, said in (("lds", "LDS"), ("qld", "QLD")):
        if not all(key in one for one in (judge, words, rival)):
            lines.append(f"- {said} by Bergson: not measured.")
            continue
        ours, theirs = judge[key]["mean"], rival[key]["mean"]
        lines.append(
            f"- {said} by Bergson of {name_of(own)}: **{ours:.3f}**, above BM25's "
            f"{words[key]['mean']:.3f}: "
            f"{_above(paired(judge[key]['each'], words[key]['each']))}. Its EK-FAC has "
            f"{theirs:.3f}{_of_the_first(rival[key], judge[key])}: ours less it "
            f"{signed(_paired_there(judge[key]['each'], rival[key]['each']))}."
        )
    seconds = lds["methods"][product_name(lds["methods"])]["seconds"]["a prediction"]
    fraction = seconds / rival["seconds"]["a prediction"]
    return [
        *lines,
        f"- On these models `explain` takes {seconds:.4f} s a prediction from cells on disk, with "
        f"the pass over its text, {fraction:.1%} of EK-FAC's "
        f"{rival['seconds']['a prediction']:.2f} s, goal under {TIME_GOAL:.0%}: "
        f"{_verdict(fraction < TIME_GOAL)}. What is done once is left out.",
    ]


def _of_the_first(fewer: dict[str, Any], more: dict[str, Any]) -> str:
    count = len(fewer["each"])
    return f", on the first {count}" if count < len(more["each"]) else ""


def _paired_there(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Return the paired difference on the predictions that both were judged on."""
    count = min(len(ours), len(theirs))
    return paired(ours[:count], theirs[:count])


def _time_of_real(real: dict[str, Any]) -> list[str]:
    last = real["runs"][-1]
    ours, theirs = last["explain"], last["ekfac"]
    fraction = ours["a prediction"] / theirs["a prediction"]
    sizes = " and ".join(
        f"{one['ekfac']['a prediction']:.1f} s over {one['ekfac']['documents']}"
        for one in real["runs"]
    )
    return [
        f"- On {last['model']} ({last['parameters'] / 1e6:.1f} M parameters) EK-FAC takes {sizes} "
        f"beginnings of {last['document']} tokens, asked for what follows {last['prompt']} "
        f"held-out tokens, {last['predictions']} predictions at once: it reads every document anew "
        f"for what it is asked. `explain`, in the last run, takes {ours['a prediction']:.2f} "
        "s a prediction, one after another, with the pass over its text and the predictions "
        f"before, over {last['positions']:,} positions of {ours['documents']:,} documents: "
        f"{fraction:.2%} of EK-FAC's over {theirs['documents']}: "
        f"{_verdict(fraction < TIME_GOAL)}.",
    ]


def _reference(methods: dict[str, Any]) -> str:
    return next(name for name in methods if name.startswith("evidence"))


def _judged(lds: dict[str, Any], tool: dict[str, Any]) -> list[str]:
    lines = [
        f"Bergson {tool['bergson']} reads the same models and judges scores of its own and ours. "
        "*QLD*: it trains once more for each prediction, without the 1 % of the documents with the "
        "largest scores; what the loss rises by, less the mean of three trainings without as many "
        "at random. Its methods leave out the embedding and the output layer, as is usual for "
        f"EK-FAC; it was asked for all predictions at once. ± over predictions{_asked(tool)}. "
        f"{_same_figure(lds, tool)}",
        "",
        *table_head("| method | LDS | QLD | s a prediction | s once |"),
    ]
    for name, found in tool["methods"].items():
        seconds = found["seconds"]
        removed = "–"
        if "qld" in found:
            removed = f"{found['qld']['mean']:+.3f} ± {found['qld']['error']:.3f}"
        lines.append(
            f"| {name_of(name)} | {found['lds']['mean']:.3f} ± {found['lds']['error']:.3f} | "
            f"{removed} | {seconds['a prediction']:.3g} | {seconds['once']:.3g} |"
        )
    return lines


def _forgetting(lost: dict[str, Any]) -> list[str]:
    lines = table_head("| method | nats | the first − it |")
    names = sorted(lost["methods"], key=lambda name: name != PRODUCT)
    for name in names:
        found = lost["methods"][name]["lost"]
        less = paired(_lost(lost, names[0]), _lost(lost, name))
        lines.append(
            f"| {name_of(name)} | {found['mean']:+.3f} ± {found['error']:.3f} | "
            f"{'–' if name == names[0] else signed(less)} |"
        )
    return lines


def _lost(lost: dict[str, Any], name: str) -> np.ndarray:
    return np.array(lost["methods"][name]["each"]).mean(1)


def _above(difference: tuple[float, float]) -> str:
    """Say whether one is above the other, and whether by more than chance."""
    mean, error = difference
    doubt = ", within two errors: **not shown**" if 0 < mean <= 2 * error else ""
    return f"{_verdict(mean > 0)}, paired {signed(difference)}{doubt}"


def _verdict(reached: bool) -> str:
    return "met" if reached else "**missed**"


if __name__ == "__main__":
    raise SystemExit(main())
