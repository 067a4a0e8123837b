"""Sections on coding rates, resonance and the loss by length of signal/noise attention."""

from __future__ import annotations

import math
import statistics
from typing import Any

from benchmarks.shared.over_seeds import Answer, Claim, Figures, answers, lines_of, spread
from benchmarks.shared.pages import table_head
from benchmarks.signal_noise_attention.figures import DEFAULT, OTHERS, mean
from benchmarks.signal_noise_attention.measure import OWN, VOCABULARY
from prismlm.instruments.heads.resonance import ORDER, RATIOS, denominators, pair_ratios
from prismlm.models.presets import build_config
from prismlm.ops.signal_noise_attention import SCALINGS, Scaling

SOURCE_HEAD_SIZE = 64
GAINS = ("gain", "gain_over_scaled", "gain_over_shuffled")
RATIO_VARIANTS = (
    *("ratio 3", "ratio 22/7", "golden ratio", "ratio 2", "ratio 1"),
    "angles times π",
)
Row = dict[str, Any]


def rates(models: dict[str, list[Row]]) -> list[str]:
    """Return the section on the difference of coding rates, beside random weights."""
    own = {name: rows for name, rows in models.items() if rows[0]["spectra"].get("rates")}
    if not own:
        return []
    lines = [
        "## Does a layer raise the difference of coding rates?",
        "",
        "ΔR = R(Z | U_s) − λ R(Z | U_n), in nats, of the stream that a layer reads, and what its "
        "step adds: to ΔR alone, beyond stretching Z to the same size, beyond the steps of other "
        "positions, with in how many layers of all it is above 0; to R(Z | U_s) and to R(Z | U_n), "
        "of which the source wants the one raised and the other lowered. *Length* is the step's, "
        "over that of Z. A longer step gains more: *by length* is the gain over the length, and "
        "*at the other's length* what the step adds to ΔR when it is scaled to the length that the "
        "same layer's step has in the other model, untrained or trained. The cosine is of the step "
        "with ∂ΔR/∂Z. Incoherence is ‖U_sᵀU_n‖ normalised, beside random dictionaries. Means over "
        "layers and seeds; *untrained*: random weights of the same configuration and λ.",
        "",
        *table_head(
            "| model | ΔR | gain | over stretching | over others' steps | R(Z \\| U_s) | "
            "R(Z \\| U_n) | length | by length | at the other's length | cosine | incoherence | "
            "random |"
        ),
    ]
    for name, rows in own.items():
        lines.append(_rates_row(name, [layer for row in rows for layer in row["spectra"]["rates"]]))
        control = [layer for row in rows for layer in _untrained(row)]
        if control:
            lines.append(_rates_row(f"{name}, untrained", control))
    return [*lines, "", *_rates_answers(own.get(DEFAULT, [])), ""]


def _untrained(row: Row) -> list[Row]:
    return row.get("untrained", {}).get("rates", [])


def _rates_row(name: str, layers: list[Row]) -> str:
    cells = [mean(layer["before"]["difference"] for layer in layers)]
    for gain in GAINS:
        values = [layer[gain] for layer in layers]
        above = sum(value > 0 for value in values)
        cells.append(f"{mean(values)} ({above} of {len(values)})")
    for group in ("signal", "noise"):
        added = statistics.fmean(layer["after"][group] - layer["before"][group] for layer in layers)
        cells.append(f"{added:+.3g}")
    cells.append(mean(layer["step_size"] for layer in layers))
    cells.append(mean(layer["gain"] / layer["step_size"] for layer in layers))
    resized = [gain for layer in layers if (gain := layer.get("gain_resized")) is not None]
    cells.append(mean(resized) if resized else "–")
    cells.append(mean(layer["gradient_cosine"] for layer in layers))
    cells += [mean(layer["incoherence"][key] for layer in layers) for key in ("own", "random")]
    return f"| {name} | {' | '.join(cells)} |"


def _rates_answers(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    layers = [layer for row in rows for layer in _trained(row)]
    if layers:
        raised = sum(min(layer[gain] for gain in GAINS) > 0 for layer in layers)
        lines.append(
            f"- With {DEFAULT}, a layer's step raises ΔR, and by more than stretching and others' "
            f"steps, in {raised} of {len(layers)} layers of all seeds."
        )
        lines += _training_lines(rows)
    return lines


def _at_equal_length(rows: list[Row]) -> list[Claim]:
    """Return that random weights add less to ΔR than a trained step of the same length.

    By the gain over the length of the step; and by the one step scaled to the other and the other
    way round, in the seeds in which that was read. Means over layers.
    """
    claims: list[Claim] = []
    for words, of_random, of_own in (
        ("a step, over its length", _by_length, _by_length),
        ("a step of the trained one's length", _resized, _gain),
        ("a step of the untrained one's length", _gain, _resized),
    ):
        figures: list[Figures] = [
            {row["seed"]: statistics.fmean(map(figure, layers(row))) for row in rows}
            for layers, figure in ((_untrained, of_random), (_trained, of_own))
        ]
        measured = [{s: f for s, f in found.items() if not math.isnan(f)} for found in figures]
        if all(measured):
            what = f"Less added to ΔR with random weights than trained with {DEFAULT}, by {words}"
            claims.append(Claim(what, *measured))
    return claims


def _trained(row: Row) -> list[Row]:
    return row["spectra"].get("rates", [])


def _gain(layer: Row) -> float:
    return layer["gain"]


def _by_length(layer: Row) -> float:
    return layer["gain"] / layer["step_size"]


def _resized(layer: Row) -> float:
    gain = layer.get("gain_resized")
    return math.nan if gain is None else gain


def training_raises(rows: list[Row]) -> str:
    """Return whether training makes steps raise ΔR more than random weights' of that length do."""
    read = [row for row in rows if _trained(row) and _untrained(row)]
    signs = {answer.sign for answer in answers(_at_equal_length(read))}
    if signs & {-1, 1} == {-1} and 0 not in signs:
        return "**yes**"
    return "**no**" if 1 in signs and -1 not in signs else "not shown"


def _training_lines(rows: list[Row]) -> list[str]:
    verdict = f"- Training makes a layer's step raise ΔR, at equal length: {training_raises(rows)}."
    read = [row for row in rows if _untrained(row)]
    if not read:
        return [f"{verdict} The untrained control was not read, and random weights may do so too."]
    longer = [
        own["step_size"] / random["step_size"]
        for row in read
        for own, random in zip(_trained(row), _untrained(row), strict=True)
    ]
    return [
        f"- A trained step is {min(longer):.2g} to {max(longer):.2g} times as long as that of "
        "random weights, which alone makes it gain more.",
        *lines_of(_at_equal_length(read)),
        verdict,
    ]


def resonance(models: dict[str, list[Row]]) -> list[str]:
    """Return the section on cross terms: of models by the ratio they were trained with, and of π's.

    Small denominators are of the settings alone, and computed here.
    """
    own = _own_terms(models)
    rows = [row for row in models.get(DEFAULT, []) if row["spectra"].get("cross_terms")]
    if not own or not rows:
        return []
    normalised = {
        name: {seed: term["normalised"] for seed, term in found.items()}
        for name, found in own.items()
    }
    others = [name for name in own if name != DEFAULT]
    found = answers(
        [
            Claim(
                f"K_SN / √(K_SS K_NN) is smaller in models trained with {DEFAULT} than with {name}",
                normalised[DEFAULT],
                normalised[name],
            )
            for name in others
        ]
    )
    return [
        "## Does π keep the groups further apart than other ratios?",
        "",
        "K_SN / √(K_SS K_NN), of Eq. 10 and 11: 1 where both groups do the same. First each model "
        "under the ratio that it was trained with, mean over layers, then over seeds, least and "
        "most. K_SN itself grows with the size of what heads read.",
        "",
        *table_head("| trained with | K_SN | normalised | seeds |"),
        *(
            f"| {name} | "
            f"{spread(statistics.fmean(_k_sn(term)) for term in terms.values())} | "
            f"{spread(normalised[name].values(), '.4f')} | {len(terms)} |"
            for name, terms in own.items()
        ),
        "",
        *(answer.line for answer in found),
        _conjecture(others, found),
        "",
        *_exchanged(rows),
        "",
    ]


def _own_terms(models: dict[str, list[Row]]) -> dict[str, dict[int, Row]]:
    """Return the cross terms of models under their own ratio, by what they were trained with."""
    found: dict[str, dict[int, Row]] = {}
    for name in (DEFAULT, *RATIO_VARIANTS):
        for row in models.get(name, []):
            for term in row["spectra"].get("cross_terms") or []:
                if term["ratio"] == "own":
                    found.setdefault(name, {})[row["seed"]] = term
    return found if DEFAULT in found else {}


def _k_sn(term: Row) -> list[float]:
    return [layer["signal_noise"] for layer in term["layers"]]


def _conjecture(others: list[str], found: list[Answer]) -> str:
    if not others:
        return "- No model trained with another ratio was read: there is no answer."
    apart, nearer = (
        [name for name, answer in zip(others, found, strict=True) if answer.sign == sign]
        for sign in (-1, 1)
    )
    if len(apart) == len(others):
        answer = "**yes**, further than with each of the other ratios trained"
    else:
        known = [f"further than with {', '.join(apart)}"] if apart else []
        known += [f"less far than with {', '.join(nearer)}"] if nearer else []
        answer = "; ".join(["**no**" if nearer else "not shown", *known])
    return f"- π keeps the groups further apart than other ratios: {answer}."


def _exchanged(rows: list[Row]) -> list[str]:
    """Return what other ratios would give with the content of the models trained with π."""
    lines = [
        f"Then other ratios with the content of the models trained with {DEFAULT} (mean over "
        "layers and seeds), and of frequencies alone: this tells rotations apart, not models. Then "
        f"the least |nω_S − mω_N| for n, m up to {ORDER}, n:m in brackets, all pairs and without "
        "the first pair of each group, which scaling of the base leaves as it is; of float64 "
        "frequencies, so that 0 is an exact resonance.",
        "",
        "| ratio | scaled | with content | frequencies alone | least denominator | "
        "without the first pairs |",
        "|---|---|---|---|---|---|",
    ]
    for (name, scaling), (least, later) in least_denominators().items():
        same = [
            term
            for row in rows
            for term in row["spectra"]["cross_terms"]
            if (term["ratio"], term["scaling"]) == (name, scaling)
        ]
        if same:
            lines.append(
                f"| {name} | {scaling} | {mean(t['normalised'] for t in same)} | "
                f"{same[0]['position']['normalised']:.4g} | {_resonating(least)} | "
                f"{'–' if later is None else _resonating(later)} |"
            )
    return [*lines, "", *_ratios_of_pairs()]


def _ratios_of_pairs() -> list[str]:
    """Return the ratio ω_S / ω_N of pairs of frequencies, by what π scales."""
    config: Any = build_config(OWN, VOCABULARY, 0)
    lines = [
        "The conjecture is of one ratio between the frequencies of the groups, and with a scaled "
        "base, which the source's equations have, there is none: ω_S / ω_N is another in each "
        "pair. With scaled angles, as its Fig. 1 prints them, it is one.",
        "",
        *table_head("| head size | scaled | first pair | middle pair | last pair |"),
    ]
    for size, whose in ((config.head_size, "here"), (SOURCE_HEAD_SIZE, "the source's")):
        for scaling in SCALINGS:
            found = pair_ratios(size, config.frequency_base, config.frequency_ratio, scaling)
            shown = (f"{found[j]:.2g}" for j in (0, len(found) // 2, -1))
            lines.append(f"| {size}, {whose} | {scaling} | {' | '.join(shown)} |")
    return lines


def least_denominators() -> dict[tuple[str, Scaling], tuple[Row, Row | None]]:
    """Return the small denominators of the models here by ratio and by what it scales."""
    config: Any = build_config(OWN, VOCABULARY, 0)
    return {
        (name, scaling): denominators(config.head_size, config.frequency_base, ratio, scaling)
        for scaling in SCALINGS
        for name, ratio in RATIOS.items()
    }


def _resonating(found: Row) -> str:
    value = f"{found['value']:.3g}" if found["value"] else "0"
    return f"{value} ({found['n']}:{found['m']})"


def length(models: dict[str, list[Row]]) -> list[str]:
    """Return the section on the loss beyond the trained length."""
    found = {
        name: {row["seed"]: row["spectra"]["loss"] for row in rows if row["spectra"].get("loss")}
        for name, rows in models.items()
    }
    found = {name: losses for name, losses in found.items() if losses}
    if not found:
        return []
    first = next(iter(next(iter(found.values())).values()))
    beyond = [b for b in first["buckets"] if b["difference"] is not None]
    names = [f"{bucket['low']} to {bucket['high']}" for bucket in beyond]
    absent = [name for name in models if name not in found]
    lines = [
        "## The loss beyond the trained length",
        "",
        f"Trained on rows of {first['trained_length']} tokens. Nats per token at so many tokens of "
        "context, less those of the same tokens read in windows of the trained length: above 0, "
        "what lies further back hurts. Mean over seeds, least and most; ± the standard error over "
        "documents, of paired differences, its mean over seeds.",
        "",
    ]
    if "GPT-2" in absent:
        lines += [
            "GPT-2 is missing: its learned positions beyond the trained length are as they were "
            "drawn, and it was not read there.",
            "",
        ]
    lines += [*table_head(f"| model | {' | '.join(names)} | documents |")]
    for name, losses in found.items():
        cells = [_beyond_cell(list(losses.values()), wanted) for wanted in beyond]
        documents = next(iter(losses.values()))["documents"]
        lines.append(f"| {name} | {' | '.join(cells)} | {documents} |")
    last: dict[str, Figures] = {
        name: {seed: loss["buckets"][-1]["difference"] for seed, loss in losses.items()}
        for name, losses in found.items()
    }
    wanted = [
        Claim(
            f"At {names[-1]} tokens, smaller with {DEFAULT} than with {other}",
            last[DEFAULT],
            last[other],
        )
        for other in OTHERS
        if names and DEFAULT in last and other in last
    ]
    return [*lines, "", *lines_of(wanted), ""]


def _beyond_cell(losses: list[Row], wanted: Row) -> str:
    same = [
        bucket
        for loss in losses
        for bucket in loss["buckets"]
        if (bucket["low"], bucket["high"]) == (wanted["low"], wanted["high"])
    ]
    shown = spread((bucket["difference"] for bucket in same), "+.3f")
    errors = [b["difference_error"] for b in same if b.get("difference_error") is not None]
    return f"{shown} ± {statistics.fmean(errors):.3f}" if errors else shown
