"""Write docs/results/prototype_mixer.md from its folder; ``--check`` only compares the two."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.prototype_mixer.measure import IMPROVEMENTS
from benchmarks.shared.pages import RESULTS, publish, runs_made
from prismlm.models.presets import PRESETS

NAMES = {"llama": "LLaMA", "mamba": "Mamba 2", "deltanet": "DeltaNet", "protot": "ProtoT"}
# Table 1 of the source: perplexity at 256, 512, 1,024 and 2,048.
SOURCE = {
    "llama": (78.7, 70.4, 65.3, 63.6),
    "mamba": (86.0, 78.0, 70.5, 69.5),
    "deltanet": (90.4, 76.3, 70.6, 68.9),
    "protot": (90.5, 84.8, 80.5, 81.9),
}
SOURCE_CONTEXTS = (256, 512, 1024, 2048)
SOURCE_WARMUP, SOURCE_DROPOUT = 0.02, 0.1
BEST = "at the best of the rates run with the most seeds"
Row = dict[str, Any]


class Key(NamedTuple):
    """What seeds are put together over."""

    model: str
    variant: str
    context: int
    factor: float
    steps: int


Runs = dict[Key, list[Row]]


def main() -> int:
    """Render, or say whether the page is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    files = sorted((given.results / "prototype_mixer").glob("*.json"))
    if not files:
        print(f"{given.results / 'prototype_mixer'} holds no run: nothing to render")
        return 0
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return publish({given.results / "prototype_mixer.md": render(rows)}, check=given.check)


def render(rows: list[Row]) -> str:
    """Return the page."""
    runs: Runs = defaultdict(list)
    for row in rows:
        key = Key(
            row["model"], row["variant"], row["context"], row["factor"], row["settings"]["steps"]
        )
        runs[key].append(row)
    steps = statistics.mode(row["settings"]["steps"] for row in rows)
    at_once = {key: found for key, found in runs.items() if key.steps == steps}
    longer = {key: found for key, found in runs.items() if key.steps > steps}
    contexts = sorted({key.context for key in at_once})
    best = {name: _best_factor(at_once, name) for name in NAMES}
    lines = [
        "# The prototype mixer beside attention, Mamba and the delta rule",
        "",
        "Generated from the files of `prototype_mixer/` by "
        "`python -m benchmarks.prototype_mixer.render`;",
        "`benchmarks/prototype_mixer/measure.py` writes those and says how.",
        "",
        f"Perplexity on held-out text, {steps} steps where nothing else is said, corpus "
        f"`{_several({row['settings']['corpus'] for row in rows})}`, seeds "
        f"{_several({row['seed'] for row in rows})}: mean over seeds, least and most in brackets. "
        "Every model sees the same rows in the same order. One size, one corpus: what holds here "
        "need not hold at the source's.",
        "",
        *_in_words(at_once, longer, best),
        *_setting(rows),
        *_contexts_apart(at_once, contexts),
        *_compared(at_once, contexts, dict.fromkeys(NAMES, 1.0), "at the source's rates"),
        *_rates(at_once, contexts),
    ]
    if set(best.values()) != {1.0}:
        lines += _compared(at_once, contexts, best, BEST, _on_the_choice(at_once, best))
    lines += [
        *_longer(longer, steps),
        *_improved(at_once, contexts, best["protot"]),
        runs_made([row["environment"] for row in rows]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _best_factor(runs: Runs, model: str) -> float:
    """Return the rate, times the source's, of least mean perplexity at the shortest context.

    Of the rates that were run there with the most seeds.
    """
    found = _rates_of(runs, model)
    if not found:
        return 1.0
    most = max(map(_seeds, found.values()))
    means = {factor: _average(rows) for factor, rows in found.items() if _seeds(rows) == most}
    return min(means, key=lambda factor: means[factor])


def _rates_of(runs: Runs, model: str) -> dict[float, list[Row]]:
    """Return the runs of a model at the shortest context, by rate."""
    tried = {key: rows for key, rows in runs.items() if key.model == model and not key.variant}
    shortest = min((key.context for key in tried), default=0)
    return {key.factor: rows for key, rows in tried.items() if key.context == shortest}


def _seeds(rows: list[Row]) -> int:
    return len({row["seed"] for row in rows})


def _average(rows: list[Row]) -> float:
    return statistics.mean(row["perplexity"] for row in rows)


def _counted(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def _on_the_choice(runs: Runs, best: dict[str, float]) -> str:
    """Say what the rates were chosen by, and which of fewer seeds were better still."""
    better: list[str] = []
    for name, factor in best.items():
        found = _rates_of(runs, name)
        for other, rows in sorted(found.items()):
            if _average(rows) < _average(found[factor]):
                better.append(
                    f"{NAMES[name]} at × {other:g} has {_average(rows):.2f} "
                    f"({_counted(_seeds(rows))}), below its {_average(found[factor]):.2f} at "
                    f"× {factor:g}"
                )
    said = (
        "Each rate was chosen by its perplexity on the held-out text that is reported here, so "
        "these figures are too good by what the choice gains."
    )
    if better:
        said += f" Rates run with fewer seeds are passed over: {'; '.join(better)}."
    return said


def _in_words(runs: Runs, longer: Runs, best: dict[str, float]) -> list[str]:
    """Return what ProtoT's perplexity is of LLaMA's, by rates and by steps."""
    found: list[str] = []
    for where, group, factors in (
        ("at the source's rates", runs, {"llama": 1.0, "protot": 1.0}),
        (f"{BEST}, each its own", runs, best),
        ("of longer training", longer, {"llama": 1.0, "protot": 1.0}),
    ):
        shared = [key for key in group if (key.model, key.variant) == ("protot", "")]
        shortest = min((key.context for key in shared), default=0)
        for key in shared:
            other = key._replace(model="llama", factor=factors["llama"])
            if key.context == shortest and key.factor == factors["protot"] and other in group:
                ratio = _ratio(group[key], group[other])
                paired = {row["seed"] for row in group[key]} & {r["seed"] for r in group[other]}
                found.append(
                    f"{ratio} ({_counted(len(paired))}) {where}, {key.steps} steps of rows of "
                    f"{key.context}"
                )
    if not found:
        return []
    return [f"ProtoT's perplexity over LLaMA's: {'; '.join(found)}. The source has 1.15.", ""]


def _setting(rows: list[Row]) -> list[str]:
    """Return where the runs are not set as the source's are."""
    settings = {row["model"]: row["settings"] for row in rows if not row["variant"]}
    models = {
        name: PRESETS.get(found["model"].get("preset"), {}) | found["model"]
        for name, found in settings.items()
    }
    warmups = {found["optimizer"]["warmup"] for found in settings.values()}
    dropouts = {
        model.get(name, 0.0)
        for model in models.values()
        for name in ("dropout", "attention_dropout")
    }
    dropout = "none" if dropouts == {0.0} else _several(dropouts)
    said = (
        f"Settings that are not the source's: the rate rises over "
        f"{_several({f'{share:.0%}' for share in warmups})} of the steps (the source: "
        f"{SOURCE_WARMUP:.0%}); dropout is {dropout} (the source: {SOURCE_DROPOUT:g}); rows are "
        f"{_several({found['data']['packing'] for found in settings.values()})}, so that no model "
        "sees two documents in one"
    )
    if "mamba" in models:
        kind, layers = models["mamba"]["model_type"], models["mamba"]["num_hidden_layers"]
        others = {m["num_hidden_layers"] for name, m in models.items() if name != "mamba"}
        said += (
            f"; in place of the source's Mamba, of as many layers as its other models, stands "
            f"`{kind}` of {layers} layers beside models of {_several(others)}"
        )
    return [said + ".", ""]


def _contexts_apart(runs: Runs, contexts: list[int]) -> list[str]:
    """Say why perplexities of two contexts are no comparison."""
    if len(contexts) < 2:
        return []
    said: list[str] = []
    for context in (contexts[0], contexts[-1]):
        rows = [row for key, found in runs.items() if key.context == context for row in found]
        tokens = statistics.mean({row["seed"]: row["tokens"] for row in rows}.values())
        at_once = _several({row["settings"]["batch_size"] for row in rows})
        steps = _several({row["settings"]["steps"] for row in rows})
        said.append(
            f"{tokens:,.0f} tokens in {steps} steps of {at_once} "
            f"{'row' if at_once == '1' else 'rows'} at {context:,}"
        )
    return [
        "Perplexities of different contexts must not be compared. A row holds a piece of one "
        "document, filled up with padding, so that longer rows hold fewer tokens to learn from, "
        f"and fewer rows make a step: {' against '.join(said)} (mean over seeds).",
        "",
    ]


def _several(values: set[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def _compared(
    runs: Runs, contexts: list[int], factors: dict[str, float], where: str, note: str = ""
) -> list[str]:
    steps = next(iter(runs)).steps
    table = {
        name: [runs.get(Key(name, "", context, factors[name], steps)) for context in contexts]
        for name in NAMES
    }
    table = {name: found for name, found in table.items() if any(found)}
    lines = [f"## By context, {where}", "", *([note, ""] if note else [])]
    lines += [_header("model", contexts, "parameters"), _rule(contexts, 1)]
    for name, found in table.items():
        size = next((rows[0]["parameters"] for rows in found if rows), None)
        times = f", rate × {factors[name]:g}" if factors[name] != 1 else ""
        cells = " | ".join(_cell(rows) for rows in found)
        lines.append(f"| {NAMES[name]}{times} | {cells} | {_number(size)} |")
    if "llama" in table:
        lines += [
            "",
            "Against LLaMA at the same context and seed, median and range of the ratio; in "
            "brackets the source's (Table 1, another size and corpus).",
            "",
            _header("model", contexts),
            _rule(contexts),
        ]
        for name, found in table.items():
            if name != "llama":
                cells = [
                    _ratio(rows, other) + _source(name, context)
                    for context, rows, other in zip(contexts, found, table["llama"], strict=True)
                ]
                lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        "Training, seconds by the clock (processor seconds), evaluation among them, median; runs "
        "did not take turns, so these are no comparison of speed. A run that was resumed is not "
        "counted.",
        "",
        _header("model", contexts),
        _rule(contexts),
    ]
    for name, found in table.items():
        lines.append(f"| {NAMES[name]} | {' | '.join(_time(rows) for rows in found)} |")
    return [*lines, ""]


def _longer(runs: Runs, steps: int) -> list[str]:
    if not runs:
        return []
    lines = [
        "## Longer training",
        "",
        "The rate falls over as many steps; the text is then read more than once.",
        "",
        f"| model | rows of | steps ({steps} above) | perplexity | over LLaMA |",
        "|---|---|---|---|---|",
    ]
    for key, rows in sorted(runs.items(), key=lambda item: (item[0].context, item[0])):
        other = runs.get(key._replace(model="llama", variant="", factor=1.0))
        name = ", ".join(
            [
                NAMES[key.model],
                *([key.variant] if key.variant else []),
                *([f"rate × {key.factor:g}"] if key.factor != 1 else []),
            ]
        )
        ratio = "" if (key.model, key.factor) == ("llama", 1.0) else _ratio(rows, other)
        shared = {row["seed"] for row in rows} & {row["seed"] for row in other or []}
        if ratio and 0 < len(shared) < max(len(rows), len(other or [])):
            ratio += f" ({len(shared)} seed{'s' if len(shared) > 1 else ''} in common)"
        lines.append(f"| {name} | {key.context:,} | {key.steps:,} | {_cell(rows)} | {ratio} |")
    return [*lines, ""]


def _improved(runs: Runs, contexts: list[int], best: float) -> list[str]:
    steps = next(iter(runs)).steps
    variants = list(dict.fromkeys(key.variant for key in runs if key.variant))
    if not variants:
        return []
    lines = [
        "## ProtoT, varied",
        "",
        "At the source's rate. Perplexity, and in brackets its ratio to the default's with the "
        f"same seeds: median and range. Below 1 is better. {len(variants)} of the "
        f"{len(IMPROVEMENTS)} variants that `benchmarks/prototype_mixer/measure.py` lists were "
        "run.",
        "",
        *_beside_the_rate(runs, best),
        _header("what", contexts, "seeds", "parameters"),
        _rule(contexts, 2),
    ]
    raised = [("", best)] if best != 1 else []
    for variant, factor in [("", 1.0), *raised, *((variant, 1.0) for variant in variants)]:
        found = [runs.get(Key("protot", variant, context, factor, steps)) for context in contexts]
        size = next((rows[0]["parameters"] for rows in found if rows), None)
        default = [runs.get(Key("protot", "", context, 1.0, steps)) for context in contexts]
        raised_rate = factor != 1
        cells = [
            _mean(rows) + (f" ({_ratio(rows, other)})" if rows and (variant or raised_rate) else "")
            for rows, other in zip(found, default, strict=True)
        ]
        seeds = _several({row["seed"] for rows in found for row in rows or []})
        name = (variant or "default") + (f", rate × {factor:g}" if raised_rate else "")
        lines.append(f"| {name} | {' | '.join(cells)} | {seeds} | {_number(size)} |")
    return [*lines, ""]


def _beside_the_rate(runs: Runs, best: float) -> list[str]:
    """Compare the variants with the default at its best rate, where that is another."""
    found = _rates_of(runs, "protot")
    if best == 1 or best not in found:
        return []
    context = found[best][0]["context"]
    varied = [
        _average(rows) for key, rows in runs.items() if key.variant and key.context == context
    ]
    below = sum(_average(found[best]) < mean for mean in varied)
    return [
        f"Variants were run at the source's rate only. The default at × {best:g} has "
        f"{_average(found[best]):.2f} at {context:,} ({_counted(_seeds(found[best]))}), below "
        f"{below} of {len(varied)} variants there. So a variant's gain cannot be told from that of "
        "a higher rate.",
        "",
    ]


def _rates(runs: Runs, contexts: list[int]) -> list[str]:
    steps = next(iter(runs)).steps
    factors = sorted({key.factor for key in runs})
    if factors == [1.0]:
        return []
    lines = [
        "## Other learning rates",
        "",
        "The source's rates were found for its size. Below, each model has the rate of least mean "
        "perplexity at the shortest context, of those run with the most seeds.",
        "",
        _header("model, × its rate", contexts),
        _rule(contexts),
    ]
    for name in NAMES:
        for factor in factors:
            found = [runs.get(Key(name, "", context, factor, steps)) for context in contexts]
            if any(found):
                cells = " | ".join(_cell(rows) for rows in found)
                lines.append(f"| {NAMES[name]}, {factor:g} | {cells} |")
    return [*lines, ""]


def _header(first: str, contexts: list[int], *more: str) -> str:
    return "| " + " | ".join([first, *(f"{context:,}" for context in contexts), *more]) + " |"


def _rule(contexts: list[int], more: int = 0) -> str:
    return "|" + "---|" * (1 + len(contexts) + more)


def _mean(rows: list[Row] | None) -> str:
    return f"{statistics.mean(row['perplexity'] for row in rows):.2f}" if rows else "–"


def _cell(rows: list[Row] | None) -> str:
    if not rows:
        return "–"
    values = [row["perplexity"] for row in rows]
    spread = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else " (one seed)"
    return _mean(rows) + spread


def _ratio(rows: list[Row] | None, others: list[Row] | None) -> str:
    """Return the ratios of perplexities of equal seeds."""
    of_seed = {row["seed"]: row["perplexity"] for row in others or []}
    found = [
        row["perplexity"] / of_seed[row["seed"]] for row in rows or [] if row["seed"] in of_seed
    ]
    if not found:
        return "–"
    spread = f", {min(found):.3f} to {max(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.median(found):.3f}{spread}"


def _source(name: str, context: int) -> str:
    if context not in SOURCE_CONTEXTS:
        return ""
    at = SOURCE_CONTEXTS.index(context)
    return f" ({SOURCE[name][at] / SOURCE['llama'][at]:.3f})"


def _time(rows: list[Row] | None) -> str:
    whole = [row for row in rows or [] if not row["resumed"]]
    if not whole:
        return "–"
    elapsed, processor = (
        statistics.median(row[key] for row in whole) for key in ("seconds", "processor_seconds")
    )
    return f"{elapsed:.0f} ({processor:.0f})"


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
