"""Write docs/results/prototype_mixer.md from its folder; ``--check`` only compares the two."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from benchmarks.prototype_mixer.figures import (
    NAMES,
    Key,
    Row,
    Runs,
    cell,
    counted,
    header,
    mean,
    number,
    ratio_of,
    source,
    time_of,
)
from benchmarks.prototype_mixer.measure import IMPROVEMENTS
from benchmarks.prototype_mixer.rates import beside_the_rate, best_factor, on_the_choice, rates
from benchmarks.prototype_mixer.table_sections import sections
from benchmarks.shared.pages import (
    page_options,
    publish,
    read_results,
    runs_made,
    several,
    table_head,
)
from prismlm.models.presets import PRESETS

SOURCE_WARMUP, SOURCE_DROPOUT = 0.02, 0.1
BEST = "at the best of the rates run with the most seeds"


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    rows = read_results(given.results / "prototype_mixer", "prototype_mixer.measure")
    tables = sections(given.results / "prototype_mixer" / "tables")
    page = render(rows, tables)
    return publish({given.results / "prototype_mixer.md": page}, check=given.check)


def render(rows: list[Row], tables: Sequence[str] = ()) -> str:
    """Return the page, with the sections of ``table_sections`` at its end."""
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
    best = {name: best_factor(at_once, name) for name in NAMES}
    lines = [
        "# The prototype mixer beside attention, Mamba and the delta rule",
        "",
        "Generated from the files of `prototype_mixer/` by "
        "`python -m benchmarks.prototype_mixer.render`;",
        "`benchmarks/prototype_mixer/measure.py` writes those and says how.",
        "",
        f"Perplexity on held-out text, {steps} steps where nothing else is said, corpus "
        f"`{several({row['settings']['corpus'] for row in rows})}`, seeds "
        f"{several({row['seed'] for row in rows})}: mean over seeds, least and most in brackets. "
        "Every model sees the same rows in the same order. One size, one corpus: what holds here "
        "need not hold at the source's.",
        "",
        *_in_words(at_once, longer, best),
        *_setting(rows),
        *_contexts_apart(at_once, contexts),
        *_compared(at_once, contexts, dict.fromkeys(NAMES, 1.0), "at the source's rates"),
        *rates(at_once, contexts),
    ]
    if set(best.values()) != {1.0}:
        lines += _compared(at_once, contexts, best, BEST, on_the_choice(at_once, best))
    lines += [
        *_longer(longer, steps),
        *_improved(at_once, contexts, best["protot"]),
        runs_made([row["environment"] for row in rows]),
        "",
        *tables,
    ]
    return "\n".join(lines).rstrip() + "\n"


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
                ratio = ratio_of(group[key], group[other])
                paired = {row["seed"] for row in group[key]} & {r["seed"] for r in group[other]}
                found.append(
                    f"{ratio} ({counted(len(paired))}) {where}, {key.steps} steps of rows of "
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
    dropout = "none" if dropouts == {0.0} else several(dropouts)
    said = (
        f"Settings that are not the source's: the rate rises over "
        f"{several({f'{share:.0%}' for share in warmups})} of the steps (the source: "
        f"{SOURCE_WARMUP:.0%}); dropout is {dropout} (the source: {SOURCE_DROPOUT:g}); rows are "
        f"{several({found['data']['packing'] for found in settings.values()})}, so that no model "
        "sees two documents in one"
    )
    if "mamba" in models:
        kind, layers = models["mamba"]["model_type"], models["mamba"]["num_hidden_layers"]
        others = {m["num_hidden_layers"] for name, m in models.items() if name != "mamba"}
        said += (
            f"; in place of the source's Mamba, of as many layers as its other models, stands "
            f"`{kind}` of {layers} layers beside models of {several(others)}"
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
        at_once = several({row["settings"]["batch_size"] for row in rows})
        steps = several({row["settings"]["steps"] for row in rows})
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
    lines += header("model", contexts, "parameters")
    for name, found in table.items():
        size = next((rows[0]["parameters"] for rows in found if rows), None)
        times = f", rate × {factors[name]:g}" if factors[name] != 1 else ""
        cells = " | ".join(cell(rows) for rows in found)
        lines.append(f"| {NAMES[name]}{times} | {cells} | {number(size)} |")
    if "llama" in table:
        lines += [
            "",
            "Against LLaMA at the same context and seed, median and range of the ratio; in "
            "brackets the source's (Table 1, another size and corpus).",
            "",
            *header("model", contexts),
        ]
        for name, found in table.items():
            if name != "llama":
                cells = [
                    ratio_of(rows, other) + source(name, context)
                    for context, rows, other in zip(contexts, found, table["llama"], strict=True)
                ]
                lines.append(f"| {NAMES[name]} | {' | '.join(cells)} |")
    lines += [
        "",
        "Training, seconds by the clock (processor seconds), evaluation among them, median; runs "
        "did not take turns, so these are no comparison of speed. A run that was resumed is not "
        "counted.",
        "",
        *header("model", contexts),
    ]
    for name, found in table.items():
        lines.append(f"| {NAMES[name]} | {' | '.join(time_of(rows) for rows in found)} |")
    return [*lines, ""]


def _longer(runs: Runs, steps: int) -> list[str]:
    if not runs:
        return []
    lines = [
        "## Longer training",
        "",
        "The rate falls over as many steps; the text is then read more than once.",
        "",
        *table_head(f"| model | rows of | steps ({steps} above) | perplexity | over LLaMA |"),
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
        ratio = "" if (key.model, key.factor) == ("llama", 1.0) else ratio_of(rows, other)
        shared = {row["seed"] for row in rows} & {row["seed"] for row in other or []}
        if ratio and 0 < len(shared) < max(len(rows), len(other or [])):
            ratio += f" ({len(shared)} seed{'s' if len(shared) > 1 else ''} in common)"
        lines.append(f"| {name} | {key.context:,} | {key.steps:,} | {cell(rows)} | {ratio} |")
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
        *beside_the_rate(runs, best),
        *header("what", contexts, "seeds", "parameters"),
    ]
    raised = [("", best)] if best != 1 else []
    for variant, factor in [("", 1.0), *raised, *((variant, 1.0) for variant in variants)]:
        found = [runs.get(Key("protot", variant, context, factor, steps)) for context in contexts]
        size = next((rows[0]["parameters"] for rows in found if rows), None)
        default = [runs.get(Key("protot", "", context, 1.0, steps)) for context in contexts]
        raised_rate = factor != 1
        cells = [
            mean(rows)
            + (f" ({ratio_of(rows, other)})" if rows and (variant or raised_rate) else "")
            for rows, other in zip(found, default, strict=True)
        ]
        seeds = several({row["seed"] for rows in found for row in rows or []})
        name = (variant or "default") + (f", rate × {factor:g}" if raised_rate else "")
        lines.append(f"| {name} | {' | '.join(cells)} | {seeds} | {number(size)} |")
    return [*lines, ""]


if __name__ == "__main__":
    raise SystemExit(main())
