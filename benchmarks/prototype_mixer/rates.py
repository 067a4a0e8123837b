"""Which rate is the best of each model, what it was chosen by, and the table of all."""

from __future__ import annotations

from benchmarks.prototype_mixer.figures import (
    NAMES,
    Key,
    Row,
    Runs,
    average,
    cell,
    counted,
    header,
    seeds_of,
)


def best_factor(runs: Runs, model: str) -> float:
    """Return the rate, times the source's, of least mean perplexity at the shortest context.

    Of the rates that were run there with the most seeds.
    """
    found = rates_of(runs, model)
    if not found:
        return 1.0
    most = max(map(seeds_of, found.values()))
    means = {factor: average(rows) for factor, rows in found.items() if seeds_of(rows) == most}
    return min(means, key=lambda factor: means[factor])


def rates_of(runs: Runs, model: str) -> dict[float, list[Row]]:
    """Return the runs of a model at the shortest context, by rate."""
    tried = {key: rows for key, rows in runs.items() if key.model == model and not key.variant}
    shortest = min((key.context for key in tried), default=0)
    return {key.factor: rows for key, rows in tried.items() if key.context == shortest}


def on_the_choice(runs: Runs, best: dict[str, float]) -> str:
    """Say what the rates were chosen by, and which of fewer seeds were better still."""
    better: list[str] = []
    for name, factor in best.items():
        found = rates_of(runs, name)
        for other, rows in sorted(found.items()):
            if average(rows) < average(found[factor]):
                better.append(
                    f"{NAMES[name]} at × {other:g} has {average(rows):.2f} "
                    f"({counted(seeds_of(rows))}), below its {average(found[factor]):.2f} at "
                    f"× {factor:g}"
                )
    said = (
        "Each rate was chosen by its perplexity on the held-out text that is reported here, so "
        "these figures are too good by what the choice gains."
    )
    if better:
        said += f" Rates run with fewer seeds are passed over: {'; '.join(better)}."
    return said


def beside_the_rate(runs: Runs, best: float) -> list[str]:
    """Compare the variants with the default at its best rate, where that is another."""
    found = rates_of(runs, "protot")
    if best == 1 or best not in found:
        return []
    context = found[best][0]["context"]
    varied = [average(rows) for key, rows in runs.items() if key.variant and key.context == context]
    below = sum(average(found[best]) < mean for mean in varied)
    return [
        f"Variants were run at the source's rate only. The default at × {best:g} has "
        f"{average(found[best]):.2f} at {context:,} ({counted(seeds_of(found[best]))}), below "
        f"{below} of {len(varied)} variants there. So a variant's gain cannot be told from that of "
        "a higher rate.",
        "",
    ]


def rates(runs: Runs, contexts: list[int]) -> list[str]:
    """Return the table of every rate that was run."""
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
        *header("model, × its rate", contexts),
    ]
    for name in NAMES:
        for factor in factors:
            found = [runs.get(Key(name, "", context, factor, steps)) for context in contexts]
            if any(found):
                cells = " | ".join(cell(rows) for rows in found)
                lines.append(f"| {NAMES[name]}, {factor:g} | {cells} |")
    return [*lines, ""]
