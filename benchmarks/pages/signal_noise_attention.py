"""Claims about signal/noise attention: trained models over seeds, beside their controls."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.shared.over_seeds import LEVEL, Answer, Claim, Figures, answers, lines_of, spread
from benchmarks.signal_noise_attention.measure import OWN, VOCABULARY
from prismlm.instruments.heads.resonance import ORDER, RATIOS, denominators, pair_ratios
from prismlm.models.presets import build_config
from prismlm.ops.signal_noise_attention import SCALINGS

Row = dict[str, Any]
Models = dict[str, list[Row]]
DEFAULT = "ratio π"
OTHERS = ("ratio 2", "ratio 1", "λ = 0", "GPT-2", "LLaMA")
"""What the default is held against, claim by claim."""
AGAINST = (
    *("ratio 3", "ratio 22/7", "golden ratio", "ratio 2", "ratio 1", "angles times π"),
    *("λ = 0", "λ = 0.1", "GPT-2", "LLaMA"),
)
EQUAL = ("R = 4", "R = 2, untied")
"""What has the parameters of GPT-2's attention, 4 d² a layer."""
SLOW = 5
"""How many times its float32 time a baseline's bf16 may take, and still be one."""
MEASURES = {
    "distance": "mean distance, positions",
    "distance_beyond_self": "the same, without self",
    "near_share": "share on 1 to 4 back",
    "entropy": "entropy, nats",
    "self_share": "share on self",
    "first_share": "share on the first token",
}
REACH = "distance_beyond_self"
LIKE_UNIFORM = 0.02
"""How near to uniform attention's a figure is called the same."""
SOURCE_TOKENS, SOURCE_HEAD_SIZE = 20_000 * 32 * 512, 64
GAINS = ("gain", "gain_over_scaled", "gain_over_shuffled")


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what the page's tables show."""
    runs = read("signal_noise_attention/*.json")
    readings = read("signal_noise_readings/*.json")
    models: Models = defaultdict(list)
    for row in sorted(readings, key=lambda row: (row["variant"] != DEFAULT, row["seed"])):
        models[row["variant"]].append(row)
    trained: dict[str, dict[int, Row]] = defaultdict(dict)
    rated: dict[tuple[str, float], dict[int, Row]] = defaultdict(dict)
    for row in runs:
        (trained[row["variant"]] if row["factor"] == 1 else rated[row["variant"], row["factor"]])[
            row["seed"]
        ] = row
    found = {
        "runs": runs,
        "default": DEFAULT,
        "trained": trained,
        "rated": rated,
        "loss": lambda rows: spread((row["ce"] for row in rows.values()), ".4f"),
        "over_default": lambda rows: spread(
            (row["ce"] - trained[DEFAULT][seed]["ce"] for seed, row in rows.items()), "+.4f"
        ),
        "described": read("stories.json"),
        "most_tokens": max(map(_tokens, runs)),
        "source_tokens": SOURCE_TOKENS,
        "readings": readings,
        "models": models,
        "elsewhere": _other_corpora(models),
        "level": LEVEL,
        "measures": MEASURES,
        "reach": REACH,
        "compared": _compared,
        "fmean": statistics.fmean,
        "order": ORDER,
        "timings": {
            "CPU": read("signal_noise_attention.json")["parts"],
            "GPU": read("signal_noise_cuda.json")["parts"],
        },
        "slow_baselines": _slow_baselines,
    }
    losses, loss_answers = _losses(trained)
    return found | {
        "losses": losses,
        "signs": {
            sign: sorted(name for name, one in loss_answers.items() if one.sign == sign)
            for sign in (-1, 0, 1)
        },
        **_reach(models),
        **_sink(models),
        **_roles(models),
        **_rates(models),
        **_resonance(models),
        **_beyond(models),
        "exchanged": _exchanged(models[DEFAULT]),
        "pairs": _pairs(),
    }


def _tokens(row: Row) -> int:
    settings = row["settings"]
    return settings["steps"] * settings["batch_size"] * settings["data"]["length"]


def _losses(trained: dict[str, dict[int, Row]]) -> tuple[list[str], dict[str, Answer]]:
    ce = {name: {seed: row["ce"] for seed, row in rows.items()} for name, rows in trained.items()}
    others = [name for name in AGAINST if name in ce]
    claims = [
        Claim(f"Lower loss with {DEFAULT} than with {name}", ce[DEFAULT], ce[name])
        for name in others
    ]
    for name in EQUAL:
        sizes = [next(iter(trained[one].values()))["parameters"] for one in (name, "GPT-2")]
        words = f"Lower loss with {name} than with GPT-2 ({sizes[0]:,} parameters and {sizes[1]:,})"
        claims.append(Claim(words, ce[name], ce["GPT-2"]))
    return lines_of(claims), dict(zip(others, answers(claims[: len(others)]), strict=True))


def _other_corpora(models: Models) -> list[tuple[str, list[int], str, str]]:
    """Return which models read another corpus than most: name, seeds, fingerprint, that of most."""
    seeds: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, rows in models.items():
        for row in rows:
            seeds[row["corpus"]["fingerprint"]][name].append(row["seed"])
    most = max(seeds, key=lambda one: sum(map(len, seeds[one].values())))
    return [
        (name, each, fingerprint, most)
        for fingerprint, by_name in seeds.items()
        if fingerprint != most
        for name, each in by_name.items()
    ]


def verdict(effects: Sequence[float], ps: Sequence[float], expected: int) -> str:
    """Return whether a claim shows in every model: sign as expected, and p below the level.

    p is over the heads of one model, so each seed has to pass by itself; bold takes two.
    """
    if not all(p < LEVEL for p in ps):
        return "not shown"
    if all(effect * expected > 0 for effect in effects):
        answer = "yes"
    elif all(effect * expected < 0 for effect in effects):
        answer = "no: the opposite"
    else:
        return "not shown"
    if len(effects) > 1:
        return f"**{answer}, in every seed**"
    return f"{answer}, in the one seed there is"


def _compared(row: Row, measure: str) -> Row:
    return next(c for c in row["heads"]["comparison"] if c["measure"] == measure)


def _reach(models: Models) -> dict[str, Any]:
    own = {name: rows for name, rows in models.items() if rows[0]["heads"]["comparison"]}
    rows = own[DEFAULT]
    default = [_compared(row, REACH) for row in rows]
    choosing = {
        group: statistics.fmean(
            head["relative_entropy"]
            for row in rows
            for head in row["heads"]["uses"]["heads"]
            if head["group"] == group
        )
        for group in ("signal", "noise")
    }
    gaps: dict[str, Figures] = {
        name: {
            row["seed"]: one["signal_median"] - one["noise_median"]
            for row in found
            for one in [_compared(row, REACH)]
        }
        for name, found in own.items()
    }
    apart = max(
        abs(_compared(row, REACH)["signal_median"] / row["heads"]["uses"]["uniform"][REACH] - 1)
        for row in rows
    )
    words = "The gap between the groups is narrower with {} than with " + DEFAULT
    return {
        "own_heads": own,
        "reach_answer": verdict([c["effect"] for c in default], [c["p"] for c in default], 1),
        "choosing": choosing,
        "reach_apart": apart,
        "like_uniform": apart < LIKE_UNIFORM and choosing["signal"] > 1 - LIKE_UNIFORM,
        "gaps": lines_of(
            [Claim(words.format(o), gaps[o], gaps[DEFAULT]) for o in ("ratio 1", "ratio 2")]
        ),
    }


def _first_beyond_self(found: Row) -> float:
    """Return the share of the first token among the attention that is not on the token itself."""
    return found["first_share"] / (1 - found["self_share"])


def _sink(models: Models) -> dict[str, Any]:
    """Return the shares of the first token, and the claims where some model has a sink.

    What noise heads look at counts λ times as much: their shares are small figures of little.
    """
    table: list[list[str]] = []
    shares: dict[str, Figures] = {}
    sinks: list[str] = []
    for name, rows in models.items():
        heads = [row["heads"]["uses"]["heads"] for row in rows]
        own = [[h for h in some if h["group"] == "signal"] or some for some in heads]
        noise = [[h for h in some if h["group"] == "noise"] for some in heads]
        uniform = [_first_beyond_self(row["heads"]["uses"]["uniform"]) for row in rows]
        means = [statistics.fmean(map(_first_beyond_self, some)) for some in own]
        shares[name] = {row["seed"]: share for row, share in zip(rows, means, strict=True)}
        if any(share > even for share, even in zip(means, uniform, strict=True)):
            sinks.append(name)
        table.append(
            [
                name,
                spread(means),
                f"{max(_first_beyond_self(head) for some in own for head in some):.3g}",
                spread(uniform),
                spread(statistics.fmean(map(_first_beyond_self, some)) for some in noise if some),
                *(
                    spread(
                        statistics.fmean(h["self_share"] for h in some) for some in group if some
                    )
                    for group in (own, noise)
                ),
                str(len(rows)),
            ]
        )
    claims = [
        Claim(f"Smaller with {DEFAULT} than with {other}", shares[DEFAULT], shares[other])
        for other in OTHERS
        if sinks and other in shares
    ]
    return {"sink": table, "sinks": sinks, "sink_claims": lines_of(claims)}


def _roles(models: Models) -> dict[str, Any]:
    """Return how many heads were found for each role, beside random weights."""
    table: list[list[str]] = []
    beyond: list[str] = []
    for name, rows in models.items():
        for at, role in enumerate(rows[0]["roles"]["roles"]):
            same = [row["roles"]["roles"][at] for row in rows]
            counts = [[one[key] for one in same] for key in ("found", "untrained")]
            best = role["best"]
            shown = [f"{best[key]:.2f}" for key in ("lift", "control", "excess")] if best else []
            shown += [f"{best['q']:.2g}"] if best else ["–"] * 4
            cells = [" ".join(map(str, each)) for each in counts]
            table.append([name, role["role"], *cells, str(rows[0]["roles"]["heads"]), *shown])
            if all(own > other for own, other in zip(*counts, strict=True)):
                beyond.append(f"{name}, {role['role']}")
    return {"roles": table, "roles_beyond": beyond, "role_search": models[DEFAULT][0]["roles"]}


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.fmean(values):.4g}"


def _trained(row: Row) -> list[Row]:
    return row["spectra"].get("rates", [])


def _untrained(row: Row) -> list[Row]:
    return row.get("untrained", {}).get("rates", [])


def _by_length(layer: Row) -> float:
    return layer["gain"] / layer["step_size"]


def _resized(layer: Row) -> float:
    gain = layer.get("gain_resized")
    return math.nan if gain is None else gain


def _rates(models: Models) -> dict[str, Any]:
    """Return what layers' steps add to the coding rates, beside random weights."""
    table: list[list[str]] = []
    for name, rows in models.items():
        for words, layers_of in ((name, _trained), (f"{name}, untrained", _untrained)):
            if layers := [layer for row in rows for layer in layers_of(row)]:
                table.append([words, *_rates_cells(layers)])
    read = [row for row in models[DEFAULT] if _trained(row) and _untrained(row)]
    layers = [layer for row in models[DEFAULT] for layer in _trained(row)]
    longer = [
        own["step_size"] / random["step_size"]
        for row in read
        for own, random in zip(_trained(row), _untrained(row), strict=True)
    ]
    claims = _at_equal_length(read)
    signs = {answer.sign for answer in answers(claims)}
    raises = (
        "**yes**" if signs == {-1} else "**no**" if 1 in signs and -1 not in signs else "not shown"
    )
    return {
        "rates": table,
        "raised": (sum(min(layer[g] for g in GAINS) > 0 for layer in layers), len(layers)),
        "longer": (min(longer), max(longer)),
        "rates_claims": lines_of(claims),
        "raises": raises,
    }


def _rates_cells(layers: list[Row]) -> list[str]:
    cells = [_mean(layer["before"]["difference"] for layer in layers)]
    for gain in GAINS:
        values = [layer[gain] for layer in layers]
        cells.append(f"{_mean(values)} ({sum(value > 0 for value in values)} of {len(values)})")
    for group in ("signal", "noise"):
        added = statistics.fmean(layer["after"][group] - layer["before"][group] for layer in layers)
        cells.append(f"{added:+.3g}")
    cells += [_mean(layer["step_size"] for layer in layers), _mean(map(_by_length, layers))]
    resized = [gain for layer in layers if not math.isnan(gain := _resized(layer))]
    cells += [_mean(resized) if resized else "–", _mean(one["gradient_cosine"] for one in layers)]
    return cells + [_mean(one["incoherence"][key] for one in layers) for key in ("own", "random")]


def _at_equal_length(rows: list[Row]) -> list[Claim]:
    """Return that random weights add less to ΔR than a trained step of the same length.

    By the gain over the length of the step; and by the one step scaled to the other and the other
    way round, in the seeds in which that was read. Means over layers.
    """
    claims: list[Claim] = []
    gain: Callable[[Row], float] = lambda layer: layer["gain"]  # noqa: E731
    for words, of_random, of_own in (
        ("a step, over its length", _by_length, _by_length),
        ("a step of the trained one's length", _resized, gain),
        ("a step of the untrained one's length", gain, _resized),
    ):
        measured = [
            {
                row["seed"]: value
                for row in rows
                if not math.isnan(value := statistics.fmean(map(figure, layers(row))))
            }
            for layers, figure in ((_untrained, of_random), (_trained, of_own))
        ]
        what = f"Less added to ΔR with random weights than trained with {DEFAULT}, by {words}"
        claims.append(Claim(what, *measured))
    return claims


def _resonance(models: Models) -> dict[str, Any]:
    """Return the cross terms of models under the ratio that they were trained with."""
    terms: dict[str, dict[int, Row]] = defaultdict(dict)
    for name in (
        DEFAULT,
        *(one for one in AGAINST if one.startswith(("ratio", "golden", "angles"))),
    ):
        for row in models.get(name, []):
            for term in row["spectra"].get("cross_terms") or []:
                if term["ratio"] == "own":
                    terms[name][row["seed"]] = term
    normalised = {
        name: {seed: term["normalised"] for seed, term in each.items()}
        for name, each in terms.items()
    }
    others = [name for name in terms if name != DEFAULT]
    words = f"K_SN / √(K_SS K_NN) is smaller in models trained with {DEFAULT} than with "
    found = answers([Claim(words + n, normalised[DEFAULT], normalised[n]) for n in others])
    apart, nearer = (
        [name for name, answer in zip(others, found, strict=True) if answer.sign == sign]
        for sign in (-1, 1)
    )
    if len(apart) == len(others):
        said = "**yes**, further than with each of the other ratios trained"
    else:
        known = [f"further than with {', '.join(apart)}"] if apart else []
        known += [f"less far than with {', '.join(nearer)}"] if nearer else []
        said = "; ".join(["**no**" if nearer else "not shown", *known])
    table = [
        (
            name,
            spread(
                statistics.fmean(layer["signal_noise"] for layer in term["layers"])
                for term in each.values()
            ),
            spread(normalised[name].values(), ".4f"),
            str(len(each)),
        )
        for name, each in terms.items()
    ]
    return {"cross": table, "cross_claims": [a.line for a in found], "conjecture": said}


def _exchanged(rows: list[Row]) -> list[list[str]]:
    """Return what other ratios would give with the content of the models trained with π.

    Small denominators are of the settings alone, and computed here.
    """
    config: Any = build_config(OWN, VOCABULARY, 0)
    table: list[list[str]] = []
    for scaling in SCALINGS:
        for name, ratio in RATIOS.items():
            same = [
                term
                for row in rows
                for term in row["spectra"]["cross_terms"]
                if (term["ratio"], term["scaling"]) == (name, scaling)
            ]
            least = denominators(config.head_size, config.frequency_base, ratio, scaling)
            cells = [
                _mean(t["normalised"] for t in same),
                f"{same[0]['position']['normalised']:.4g}",
            ]
            table.append([name, scaling, *cells, *map(_resonating, least)])
    return table


def _resonating(found: Row | None) -> str:
    if found is None:
        return "–"
    value = f"{found['value']:.3g}" if found["value"] else "0"
    return f"{value} ({found['n']}:{found['m']})"


def _pairs() -> list[list[str]]:
    """Return the ratio ω_S / ω_N of pairs of frequencies, by what π scales."""
    config: Any = build_config(OWN, VOCABULARY, 0)
    table: list[list[str]] = []
    for size, whose in ((config.head_size, "here"), (SOURCE_HEAD_SIZE, "the source's")):
        for scaling in SCALINGS:
            found = pair_ratios(size, config.frequency_base, config.frequency_ratio, scaling)
            shown = [f"{found[j]:.2g}" for j in (0, len(found) // 2, -1)]
            table.append([f"{size}, {whose}", scaling, *shown])
    return table


def _beyond(models: Models) -> dict[str, Any]:
    """Return the loss beyond the trained length."""
    found = {
        name: {row["seed"]: row["spectra"]["loss"] for row in rows if row["spectra"].get("loss")}
        for name, rows in models.items()
    }
    found = {name: losses for name, losses in found.items() if losses}
    first = found[DEFAULT][0]
    wanted = [b for b in first["buckets"] if b["difference"] is not None]
    names = [f"{bucket['low']} to {bucket['high']}" for bucket in wanted]
    table: list[list[str]] = []
    for name, losses in found.items():
        cells: list[str] = []
        for bucket in wanted:
            at = first["buckets"].index(bucket)
            same = [loss["buckets"][at] for loss in losses.values()]
            error = statistics.fmean(one["difference_error"] for one in same)
            cells.append(f"{spread((one['difference'] for one in same), '+.3f')} ± {error:.3f}")
        table.append([name, *cells, str(next(iter(losses.values()))["documents"])])
    last = {
        name: {seed: loss["buckets"][-1]["difference"] for seed, loss in losses.items()}
        for name, losses in found.items()
    }
    words = f"At {names[-1]} tokens, smaller with {DEFAULT} than with "
    claims = [Claim(words + o, last[DEFAULT], last[o]) for o in OTHERS if o in last]
    return {
        "beyond": table,
        "beyond_names": names,
        "beyond_claims": lines_of(claims),
        "trained_length": first["trained_length"],
    }


def _slow_baselines(rows: list[Row]) -> tuple[float, ...] | None:
    """Return least and most ms of GPT-2 in bf16 and float32, where bf16 is no baseline."""
    times = {
        (row["position"], row["dtype"]): row["milliseconds"][row["baseline"]]
        for row in rows
        if row["what"] == "models"
    }
    slow = [
        (found, there)
        for (position, dtype), found in times.items()
        if dtype != "float32"
        and (there := times.get((position, "float32")))
        and found > SLOW * there
    ]
    if not slow:
        return None
    bf16, float32 = zip(*slow, strict=True)
    return min(bf16), max(bf16), min(float32), max(float32)
