"""Signal/noise attention: losses over seeds, the source's claims, and time and memory."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.shared.over_seeds import Difference, Figures, differences
from benchmarks.shared.pages import ranged

Row = dict[str, Any]
Models = dict[str, list[Row]]
DEFAULT = "ratio π"
RATIOS = ("ratio 2", "ratio 1")
AGAINST = (*("ratio 3", "ratio 22/7", "golden ratio", *RATIOS), *("λ = 0", "λ = 0.1", "GPT-2"))
# Models with the parameters of GPT-2's attention, 4 d² a layer.
EQUAL = ("R = 4", "R = 2, untied")
REACH = "distance_beyond_self"
SOURCE_TOKENS = 20_000 * 32 * 512
POSITIONS = 8 * 256  # of a step of the longer runs
COLUMNS = (("CPU", "float32"), ("GPU", "float32"), ("GPU", "bfloat16"))


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    runs = read("signal_noise_attention/*.json")
    readings = read("signal_noise_readings/*.json")
    models: Models = defaultdict(list)
    for row in sorted(readings, key=lambda row: (row["variant"] != DEFAULT, row["seed"])):
        models[row["variant"]].append(row)
    timings = {"CPU": read("signal_noise_attention.json"), "GPU": read("signal_noise_cuda.json")}
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
        "reach": _reach(models),
        "entropy": _entropy(models[DEFAULT]),
        "roles": {name: _roles(models[name]) for name in (DEFAULT, "GPT-2")},
        "gains": {part: _gain(models[DEFAULT], part) for part in ("spectra", "untrained")},
        **_compared(models),
        "longer": _longer(read, runs),
        "times": {part: _times(timings, part) for part in RATIOS_OF},
        "environments": [one["parts"]["attention"]["environment"] for one in timings.values()],
    }


def _losses(runs: list[Row]) -> list[tuple[str, list[Row], Difference | None]]:
    """Return each variant with its runs and its difference, from π or for `EQUAL` from GPT-2."""
    trained: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in runs:
        trained[row["variant"]][row["seed"]] = row
    ce = {n: {seed: row["ce"] for seed, row in rows.items()} for n, rows in trained.items()}
    pairs = dict.fromkeys(AGAINST, DEFAULT) | dict.fromkeys(EQUAL, "GPT-2")
    intervals = differences([(ce[name], ce[other]) for name, other in pairs.items()])
    apart = dict(zip(pairs, intervals, strict=True))
    return [(name, list(trained[name].values()), apart.get(name)) for name in (DEFAULT, *pairs)]


def _longer(read: Callable[..., Any], runs: list[Row]) -> dict[str, Any] | None:
    """Return the runs of ten million parameters, and what their heads do; None without them."""
    if read("signal_noise_longer/prism.json", optional=True) is None:
        return None
    own, gpt2 = (read(f"signal_noise_longer/{name}.json") for name in ("prism", "gpt-2"))
    best = own["shown"]["roles"]
    roles: list[list[str]] = []
    for one, other in zip(own["roles"]["roles"], gpt2["roles"]["roles"], strict=True):
        head = best[one["role"]]
        found = [str(n) for row in (one, other) for n in (row["found"], row["untrained"])]
        shown = f"layer {head['layer']} · signal head {head['group_head']}"
        roles.append([one["role"], shown, f"{head['lift']:.2f}", f"{head['q']:.2g}", *found])
    compared = {row["measure"]: row for row in own["heads"]["comparison"]}
    config = own["settings"]["model"]
    (small,) = (apart for name, _, apart in _losses(runs) if name == "GPT-2" and apart)
    between_seeds, ahead = (small.high - small.low) / 2, gpt2["ce"] - own["ce"]
    gradients = {
        name: [point["grad_norm"] for point in run["curve"][len(run["curve"]) // 2 :]]
        for name, run in (("own", own), ("gpt2", gpt2))
    }
    return {
        "own": own,
        "verdict": next(
            (
                f"{word} in one seed"
                for word, lead in (("Shown", ahead), ("The opposite is shown", -ahead))
                if lead > between_seeds
            ),
            "Not shown",
        ),
        "between_seeds": between_seeds,
        "gpt2": gpt2,
        "rates": read("signal_noise_longer/rates.json"),
        "share": own["settings"]["steps"] * POSITIONS / SOURCE_TOKENS,
        "roles": roles,
        "found": sum(row["found"] for row in own["roles"]["roles"]),
        "untrained": sum(row["untrained"] for row in own["roles"]["roles"]),
        "reach": [compared[REACH][f"{group}_median"] for group in ("signal", "noise")],
        "uniform": own["heads"]["uniform"][REACH],
        "entropy": _entropy([{"heads": {"uses": own["heads"]}}]),
        "gradients": {name: statistics.median(lengths) for name, lengths in gradients.items()},
        # ω = base^(−2i/p), and the bases are ρ² apart.
        "slowest": math.pi ** (-4 * (config["head_size"] // 2 - 1) / config["head_size"]),
    }


def _reach(models: Models) -> list[list[str]]:
    """Return how far signal heads, noise heads and uniform attention reach, by model."""
    table: list[list[str]] = []
    for name, rows in models.items():
        compared = [
            row for model in rows for row in model["heads"]["comparison"] or ()
            if row["measure"] == REACH
        ]  # fmt: skip
        if compared:
            medians = [
                [row[f"{group}_median"] for row in compared] for group in ("signal", "noise")
            ]
            uniform = rows[0]["heads"]["uses"]["uniform"][REACH]
            means = [*map(statistics.fmean, medians), uniform]
            table.append([name, *(f"{mean:.3g}" for mean in means)])
    return table


def _entropy(rows: list[Row]) -> dict[str, float]:
    """Return the mean entropy of attention relative to uniform attention, by group of heads."""
    heads = [head for row in rows for head in row["heads"]["uses"]["heads"]]
    return {
        group: statistics.fmean(h["relative_entropy"] for h in heads if h["group"] == group)
        for group in ("signal", "noise")
    }


def _roles(rows: list[Row]) -> str:
    """Return how many heads prefer the words of each role, by seed."""
    roles = [row["roles"]["roles"] for row in rows]
    return ", ".join(
        f"{seeds[0]['role']} {' '.join(str(one['found']) for one in seeds)}"
        for seeds in zip(*roles, strict=True)
    )


def _gain(rows: list[Row], part: str) -> float:
    """Return what layers' steps add to the coding rates."""
    return statistics.fmean(
        statistics.fmean(one["gain"] for one in row[part]["rates"]) for row in rows
    )


def _compared(models: Models) -> dict[str, Any]:
    """Return the cross term of ratios, and the loss with context beyond the trained length."""
    cross: dict[str, Figures] = {
        name: {
            row["seed"]: term["normalised"]
            for row in models[name]
            for term in row["spectra"]["cross_terms"]
            if term["ratio"] == "own"
        }
        for name in (DEFAULT, *RATIOS)
    }
    losses = {
        name: {row["seed"]: row["spectra"]["loss"] for row in models[name]}
        for name in (DEFAULT, *RATIOS, "λ = 0")
    }
    last = [b for b in losses[DEFAULT][0]["buckets"] if b["difference"] is not None][-1]
    at = losses[DEFAULT][0]["buckets"].index(last)
    beyond: dict[str, Figures] = {
        name: {seed: loss["buckets"][at]["difference"] for seed, loss in by_seed.items()}
        for name, by_seed in losses.items()
    }
    return {
        "cross": cross,
        "cross_apart": _less(cross),
        "beyond_apart": _less(beyond),
        "last": last,
        "trained_length": losses[DEFAULT][0]["trained_length"],
    }


def _less(of: dict[str, Figures]) -> dict[str, Difference]:
    """Return the default less each other model."""
    others = [name for name in of if name != DEFAULT]
    return dict(zip(others, differences([(of[DEFAULT], of[n]) for n in others]), strict=True))


def _times(timings: dict[str, Row], part: str) -> list[list[str]]:
    """Return a row for each case: its names, then CPU, GPU, and GPU in bfloat16."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for device, dtype in COLUMNS:
        for row in timings[device]["parts"][part]["rows"]:
            if row["dtype"] == dtype:
                for key, ratio in RATIOS_OF[part](row).items():
                    cases.setdefault(key, []).append(ranged(ratio, "ratio", ".2f"))
    return [[*key, *cells] for key, cells in cases.items()]


def _attention_ratios(row: Row) -> dict[tuple[str, ...], Row]:
    if row["passes"] == "forward":
        return {}
    shape = f"{row['rows']} × {row['heads']} × {row['length']} × {row['head_size']}"
    return {(shape,): row["ratios"]["elapsed"]["combined"]}


def _step_ratios(row: Row) -> dict[tuple[str, ...], Row]:
    return {
        (name, f"{row['parameters'][name]:,}"): ratio
        for name, ratio in row["ratios"]["elapsed"].items()
    }


def _decode_ratios(row: Row) -> dict[tuple[str, ...], Row]:
    # In bfloat16 GPT-2 itself is some thirty times slower than in float32 there: no baseline.
    if row["what"] != "models" or row["dtype"] != "float32":
        return {}
    return {
        (name, f"{row['position']:,}", f"{row['cache_ratios'][name]:.2f}"): ratio
        for name, ratio in row["ratios"]["elapsed"].items()
        if "wide" not in name
    }


RATIOS_OF: dict[str, Callable[[Row], dict[tuple[str, ...], Row]]] = {
    "attention": _attention_ratios,
    "step": _step_ratios,
    "decode": _decode_ratios,
}
