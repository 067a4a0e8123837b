"""The source's Tables 3 to 5, and verdicts on its claims, for ``prototype_mixer_robustness.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from prismlm.eval.next_token import RANKED, TOP
from prismlm.eval.pairs import INTERVENTIONS, SLICES

FOLDER = "prototype_mixer/robustness"
NAMES = {"protot": "ProtoT", "llama": "LLaMA", "mamba2": "Mamba 2", "deltanet": "DeltaNet"}
# The columns of the source's Table 3, and its rows: JS, unit not said.
ORDER = (
    "abbreviation", "contraction", "morphology", "punctuation", "spelling", "synonym", "typo",
)  # fmt: skip
TABLE_3 = {
    "DeltaNet": (1.0657, 0.8310, 0.6671, 0.5804, 0.3547, 0.6363, 0.6257),
    "LLaMA": (0.3325, 0.0449, 0.2267, 0.1740, 0.0634, 0.1450, 0.2269),
    "Mamba": (0.1441, 0.0104, 0.0476, 0.4428, 0.0054, 0.0130, 0.0761),
    "ProtoT": (0.4166, 0.0823, 0.0498, 0.3982, 0.0260, 0.1132, 0.2074),
}
# Table 4, of ProtoT: PMR mean, std, share above 0, JS base, JS clamped, n.
TABLE_4 = {
    "abbreviation": (-0.093, 0.367, 0.596, 0.417, 0.415, 500),
    "contraction": (-0.027, 0.104, 0.330, 0.082, 0.083, 500),
    "morphology": (-0.034, 0.176, 0.474, 0.050, 0.051, 500),
    "punctuation": (-0.000, 0.373, 0.554, 0.398, 0.322, 500),
    "spelling": (-0.033, 0.225, 0.610, 0.026, 0.025, 500),
    "synonym": (0.013, 0.075, 0.606, 0.113, 0.109, 500),
    "typo": (0.001, 0.279, 0.533, 0.208, 0.186, 500),
}
# Table 5: JS, overlap, Spearman and top-1 invariance, each of gender, negation and number.
TABLE_5 = {
    "DeltaNet": ((0.054, 0.173, 0.282), (0.754, 0.540, 0.474), (0.610, 0.176, 0.033),
                 (0.616, 0.388, 0.330)),
    "LLaMA": ((0.004, 0.028, 0.022), (0.946, 0.875, 0.843), (0.966, 0.815, 0.824),
              (0.890, 0.770, 0.930)),
    "Mamba": ((0.003, 0.006, 0.007), (0.936, 0.935, 0.907), (0.949, 0.910, 0.907),
              (0.884, 0.992, 0.948)),
    "ProtoT": ((0.037, 0.081, 0.083), (0.709, 0.774, 0.657), (0.429, 0.536, 0.441),
               (0.690, 0.806, 0.806)),
}  # fmt: skip
MEASURES = {"js": "JS", "overlap": "overlap", "spearman": "Spearman", "same_top": "same top"}
DIVERGENCES = {"js": "raw", "js_matched": "matched"}
RANKS = {key: name for key, name in MEASURES.items() if key != "js"}
LEXICAL = ("synonym", "typo", "spelling", "morphology")


class Claim(NamedTuple):
    """That one model's mean is below another's, slice by slice."""

    said: str
    lower: str
    higher: str
    slices: Sequence[str]
    measures: dict[str, str] = DIVERGENCES


NOISE = (
    Claim("Mamba has the lowest JS: below LLaMA", "mamba2", "llama", SLICES),
    Claim("Mamba has the lowest JS: below ProtoT", "mamba2", "protot", SLICES),
    Claim(
        "ProtoT is below LLaMA on synonym, typo, spelling and morphology",
        *("protot", "llama", LEXICAL),
    ),
    Claim("ProtoT lags LLaMA on punctuation", "llama", "protot", ("punctuation",)),
    Claim("ProtoT reliably surpasses DeltaNet", "protot", "deltanet", SLICES),
)
FLIPS = (
    Claim("DeltaNet has the highest JS: above ProtoT", "protot", "deltanet", INTERVENTIONS),
    Claim("ProtoT's JS is above LLaMA's", "llama", "protot", INTERVENTIONS),
    Claim("ProtoT's JS is above Mamba's", "mamba2", "protot", INTERVENTIONS),
    Claim("ProtoT's ranks change more than LLaMA's", "protot", "llama", INTERVENTIONS, RANKS),
    Claim("ProtoT's ranks change more than Mamba's", "protot", "mamba2", INTERVENTIONS, RANKS),
)


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what was measured, the source's tables and verdicts on its claims."""
    noise, flips = (read(f"{FOLDER}/{name}.json") for name in ("perturbations", "interventions"))
    clamped = read(f"{FOLDER}/clamping-*.json")
    verdicts = [
        _verdict(_differences(claim, noise, key))[0] for claim in NOISE for key in claim.measures
    ]
    return {
        "noise": noise,
        "flips": flips,
        "clamped": [one | {"counts": _counts(one)} if "slices" in one else one for one in clamped],
        "names": NAMES,
        "order": ORDER,
        "interventions": INTERVENTIONS,
        "tables": (TABLE_3, TABLE_4, TABLE_5),
        "measures": MEASURES,
        "divergences": DIVERGENCES,
        "shown": {"js": "JS, raw", "js_matched": "JS, matched", **RANKS},
        "claims": (_claims(NOISE, noise), _claims(FLIPS, flips)),
        "noise_shown": (verdicts.count("**shown**"), len(verdicts)),
        "top": TOP,
        "ranked": RANKED,
    }


def _claims(claims: Sequence[Claim], found: dict[str, Any]) -> list[str]:
    """Return a line for each claim, as the paired intervals have it."""
    lines: list[str] = []
    for claim in claims:
        said = [
            f"{words}: {' '.join(_verdict(_differences(claim, found, key)))}"
            for key, words in claim.measures.items()
        ]
        lines.append(f"{claim.said}. {'; '.join(said)}")
    return lines


def _differences(claim: Claim, found: dict[str, Any], key: str) -> dict[str, tuple[float, float]]:
    """Return the interval of lower − higher for each slice."""
    intervals: dict[str, tuple[float, float]] = {}
    for part in found["slices"]:
        for row in part["differences"]:
            if part["name"] in claim.slices and set(row["of"]) == {claim.lower, claim.higher}:
                low, high = row[key]["low"], row[key]["high"]
                turned = row["of"][0] != claim.lower
                intervals[part["name"]] = (-high, -low) if turned else (low, high)
    return intervals


def _verdict(intervals: dict[str, tuple[float, float]]) -> tuple[str, str]:
    """Say whether all intervals are below 0, in how many slices, and in which they are above."""
    shown = sum(high < 0 for _, high in intervals.values())
    opposite = [name for name, (low, _) in intervals.items() if low > 0]
    if shown == len(intervals):
        word = "**shown**"
    else:
        word = "**the opposite**" if len(opposite) == len(intervals) else "**not shown**"
    against = f", the opposite in {', '.join(opposite)}" if opposite else ""
    return word, f"({shown} of {len(intervals)}{against})"


def _counts(one: dict[str, Any]) -> dict[str, int]:
    """Return in how many slices clamping helps, and how many pairs were left out."""
    judged = [part for part in one["slices"] if part["gain"] is not None]
    return {
        "slices": len(judged),
        "share": sum(part["clamped"]["share_positive"] >= 0.5 for part in judged),
        "lower": sum(part["clamped"]["pooled"]["low"] > 0 for part in judged),
        "better": sum(part["gain"]["low"] > 0 for part in judged),
        "unaligned": sum(part["unaligned"] for part in one["slices"]),
        "below_floor": sum(part["below_floor"] for part in one["slices"]),
    }
