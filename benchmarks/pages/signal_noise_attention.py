"""Signal/noise attention: losses over seeds, the source's claims, and time and memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.shared.over_seeds import Difference, Figures, differences, spread
from benchmarks.shared.pages import ranged

Row = dict[str, Any]
Models = dict[str, list[Row]]
DEFAULT = "ratio π"
RATIOS = ("ratio 2", "ratio 1")
AGAINST = (*("ratio 3", "ratio 22/7", "golden ratio", *RATIOS), *("λ = 0", "λ = 0.1", "GPT-2"))
EQUAL = ("R = 4", "R = 2, untied")
"""What has the parameters of GPT-2's attention, 4 d² a layer."""
REACH = "distance_beyond_self"
SOURCE_TOKENS = 20_000 * 32 * 512
GAINS = ("gain", "gain_over_scaled", "gain_over_shuffled")


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    runs = read("signal_noise_attention/*.json")
    readings = read("signal_noise_readings/*.json")
    models: Models = defaultdict(list)
    for row in sorted(readings, key=lambda row: (row["variant"] != DEFAULT, row["seed"])):
        models[row["variant"]].append(row)
    timings = [read(f"signal_noise_{name}.json")["parts"] for name in ("attention", "cuda")]
    settings = runs[0]["settings"]
    tokens = settings["steps"] * settings["batch_size"] * settings["data"]["length"]
    return {
        "runs": runs,
        "settings": settings,
        "losses": _losses(runs),
        "stories": read("stories.json"),
        "tokens": tokens,
        "source_share": tokens / SOURCE_TOKENS,
        "readings": readings,
        "models": models,
        **_reach(models),
        **_roles(models),
        **_rates(models),
        **_resonance(models),
        **_beyond(models),
        "attention_times": _times(timings, "attention", _attention_ratios),
        "step_times": _times(timings, "step", _step_ratios),
        "decode_times": _times(timings, "decode", _decode_ratios),
        "environments": [parts["attention"]["environment"] for parts in timings],
    }


def _losses(runs: list[Row]) -> list[tuple[str, list[Row], Difference | None]]:
    """Return each variant with its runs and its difference, from π or for `EQUAL` from GPT-2."""
    trained: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in runs:
        trained[row["variant"]][row["seed"]] = row
    ce: dict[str, Figures] = {
        name: {seed: row["ce"] for seed, row in rows.items()} for name, rows in trained.items()
    }
    pairs = dict.fromkeys(AGAINST, DEFAULT) | dict.fromkeys(EQUAL, "GPT-2")
    found = differences([(ce[name], ce[other]) for name, other in pairs.items()])
    apart = dict(zip(pairs, found, strict=True))
    return [(name, list(trained[name].values()), apart.get(name)) for name in (DEFAULT, *pairs)]


def _compared(row: Row, measure: str) -> Row:
    return next(c for c in row["heads"]["comparison"] if c["measure"] == measure)


def _reach(models: Models) -> dict[str, Any]:
    """Return how far heads of both groups reach, and how near to uniform their attention is."""
    own = {name: rows for name, rows in models.items() if rows[0]["heads"]["comparison"]}
    table: list[list[str]] = []
    gaps: dict[str, Figures] = {}
    for name, rows in own.items():
        found = [_compared(row, REACH) for row in rows]
        signal, noise = ([one[f"{group}_median"] for one in found] for group in ("signal", "noise"))
        gaps[name] = {
            row["seed"]: far - near for row, far, near in zip(rows, signal, noise, strict=True)
        }
        table.append(
            [
                name,
                f"{statistics.fmean(signal):.3g}",
                f"{statistics.fmean(noise):.3g}",
                f"{rows[0]['heads']['uses']['uniform'][REACH]:.3g}",
                " ".join(f"{one['effect']:+.2f}" for one in found),
                " ".join(f"{one['p']:.1g}" for one in found),
            ]
        )
    entropy = {
        group: statistics.fmean(
            head["relative_entropy"]
            for row in own[DEFAULT]
            for head in row["heads"]["uses"]["heads"]
            if head["group"] == group
        )
        for group in ("signal", "noise")
    }
    narrower = differences([(gaps[name], gaps[DEFAULT]) for name in RATIOS])
    return {"reach": table, "gaps": dict(zip(RATIOS, narrower, strict=True)), "entropy": entropy}


def _roles(models: Models) -> dict[str, Any]:
    """Return how many heads prefer the words of each role, by seed."""
    names = [role["role"] for role in models[DEFAULT][0]["roles"]["roles"]]
    table = [
        [
            name,
            str(rows[0]["roles"]["heads"]),
            *(
                " ".join(str(row["roles"]["roles"][at]["found"]) for row in rows)
                for at in range(len(names))
            ),
        ]
        for name, rows in models.items()
    ]
    untrained = sum(
        role["untrained"]
        for rows in models.values()
        for row in rows
        for role in row["roles"]["roles"]
    )
    return {
        "roles": table,
        "role_names": names,
        "roles_untrained": untrained,
        "role_search": models[DEFAULT][0]["roles"],
    }


def _mean(layers: list[Row], key: str) -> float:
    return statistics.fmean(layer[key] for layer in layers)


def _rates(models: Models) -> dict[str, Any]:
    """Return what layers' steps add to the coding rates, beside random weights."""
    table: list[list[str]] = []
    for name in (DEFAULT, "λ = 0"):
        for words, key in ((name, "spectra"), (f"{name}, untrained", "untrained")):
            layers = [layer for row in models[name] for layer in row.get(key, {}).get("rates", [])]
            cells = [
                words,
                f"{statistics.fmean(one['before']['difference'] for one in layers):.4g}",
            ]
            for gain in GAINS:
                raised = sum(layer[gain] > 0 for layer in layers)
                cells.append(f"{_mean(layers, gain):.3g} ({raised} of {len(layers)})")
            table.append([*cells, f"{_mean(layers, 'step_size'):.3g}"])
    # In seeds in which each step was also scaled to the length of the other.
    sides: dict[str, list[Figures]] = {
        name: [
            {row["seed"]: _mean(row[part]["rates"], key) for row in models[DEFAULT]}
            for part, key in pair
        ]
        for name, pair in {
            "trained": (("spectra", "gain"), ("untrained", "gain_resized")),
            "untrained": (("spectra", "gain_resized"), ("untrained", "gain")),
        }.items()
    }
    equal = differences([(ours, random) for ours, random in sides.values()])
    return {"rates": table, "rates_equal": dict(zip(sides, equal, strict=True))}


def _resonance(models: Models) -> dict[str, Any]:
    """Return the normalised cross term of models under the ratio that they were trained with."""
    terms: dict[str, Figures] = {
        name: {
            row["seed"]: term["normalised"]
            for row in models[name]
            for term in row["spectra"]["cross_terms"]
            if term["ratio"] == "own"
        }
        for name in (DEFAULT, *RATIOS)
    }
    apart = differences([(terms[DEFAULT], terms[name]) for name in RATIOS])
    return {"cross": terms, "cross_apart": dict(zip(RATIOS, apart, strict=True))}


def _beyond(models: Models) -> dict[str, Any]:
    """Return what context beyond the trained length adds to the loss."""
    found = {
        name: {row["seed"]: row["spectra"]["loss"] for row in rows if row["spectra"].get("loss")}
        for name, rows in models.items()
    }
    found = {name: losses for name, losses in found.items() if losses}
    first = found[DEFAULT][0]
    wanted = [at for at, one in enumerate(first["buckets"]) if one["difference"] is not None]
    names = [f"{first['buckets'][at]['low']} to {first['buckets'][at]['high']}" for at in wanted]
    table = [
        [
            name,
            *(
                spread((loss["buckets"][at]["difference"] for loss in losses.values()), "+.3f")
                for at in wanted
            ),
        ]
        for name, losses in found.items()
    ]
    last = {
        name: {seed: loss["buckets"][wanted[-1]]["difference"] for seed, loss in losses.items()}
        for name, losses in found.items()
    }
    others = (*RATIOS, "λ = 0")
    apart = differences([(last[DEFAULT], last[name]) for name in others])
    return {
        "beyond": table,
        "beyond_names": names,
        "beyond_apart": dict(zip(others, apart, strict=True)),
        "trained_length": first["trained_length"],
    }


def _times(
    timings: list[Row], part: str, ratios: Callable[[Row], dict[tuple[str, ...], Row]]
) -> list[list[str]]:
    """Return a row for each case: its names, then CPU, GPU, and GPU in bfloat16."""
    found: dict[tuple[str, ...], list[str]] = {}
    for column, (device, dtype) in enumerate(((0, "float32"), (1, "float32"), (1, "bfloat16"))):
        for row in timings[device][part]["rows"]:
            if row["dtype"] == dtype:
                for key, ratio in ratios(row).items():
                    cells = found.setdefault(key, ["–"] * 3)
                    cells[column] = ranged(ratio, "ratio", ".2f")
    return [[*key, *cells] for key, cells in found.items()]


def _attention_ratios(row: Row) -> dict[tuple[str, ...], Row]:
    if row["passes"] == "forward":
        return {}
    shape = f"{row['rows']} × {row['heads']} × {row['length']} × {row['head_size']}"
    return {
        (shape, pair): row["ratios"][pair]["elapsed"]
        for pair in ("combined / plain", "attend / rotated")
    }


def _step_ratios(row: Row) -> dict[tuple[str, ...], Row]:
    return {
        (pair.split(" / ")[0], f"{row['parameters'][pair.split(' / ')[0]]:,}"): found["elapsed"]
        for pair, found in row["ratios"].items()
    }


def _decode_ratios(row: Row) -> dict[tuple[str, ...], Row]:
    # GPT-2 itself is some thirty times slower in bfloat16 than in float32 there: no baseline.
    if row["what"] == "models" and row["dtype"] != "float32":
        return {}
    return {
        (
            "heads alone" if row["what"] == "heads" else name,
            f"{row['position']:,}",
            f"{row['cache_ratios'][name]:.2f}",
        ): found
        for name, found in row["ratios"]["elapsed"].items()
    }
