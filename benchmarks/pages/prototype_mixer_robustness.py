"""The source's Tables 3 to 5, and verdicts on its claims, for ``prototype_mixer_robustness.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.shared.pages import ranged
from prismlm.eval.next_token import RANKED, TOP
from prismlm.eval.pairs import INTERVENTIONS, SLICES

FOLDER = "prototype_mixer/robustness"
NAMES = {"protot": "ProtoT", "llama": "LLaMA", "mamba2": "Mamba 2", "deltanet": "DeltaNet"}
SOURCE_DELTANET = 1.0657
"""The largest JS of the source's Table 3, beyond what any Jensen-Shannon divergence reaches."""
# Of the source's Table 4, for ProtoT: mean PMR and share of pairs above 0.
TABLE_4 = {
    "abbreviation": (-0.093, 0.596),
    "contraction": (-0.027, 0.330),
    "morphology": (-0.034, 0.474),
    "punctuation": (-0.000, 0.554),
    "spelling": (-0.033, 0.610),
    "synonym": (0.013, 0.606),
    "typo": (0.001, 0.533),
}
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
    """Return what was measured, and verdicts on the source's claims."""
    noise, flips = (read(f"{FOLDER}/{name}.json") for name in ("perturbations", "interventions"))
    clamped = [one for one in read(f"{FOLDER}/clamping-*.json") if "slices" in one]
    return {
        "noise": noise,
        "flips": flips,
        "divergences": _table(noise, {"js": "JS"}),
        "flipped": _table(flips, MEASURES),
        "clamped": [(NAMES.get(one["name"], one["name"]), _clamping(one)) for one in clamped],
        "pairs": [part["clamped"]["pairs"] for one in clamped for part in one["slices"]],
        "protot": next(_counts(one) for one in clamped if one["name"] == "protot"),
        "claims": (_claims(NOISE, noise), _claims(FLIPS, flips)),
        "source_deltanet": SOURCE_DELTANET,
        "top": TOP,
        "ranked": RANKED,
    }


def _table(found: dict[str, Any], measures: dict[str, str]) -> list[list[str]]:
    """Return a row for each kind of change and measure, a column for each model."""
    rows: list[list[str]] = []
    for part in found["slices"]:
        for key, name in measures.items():
            figures = [part["models"][model["name"]][key] for model in found["models"]]
            cells = [ranged(figure, "value", ".3f") for figure in figures]
            rows.append([part["name"], *([name] if len(measures) > 1 else []), *cells])
    return rows


def _clamping(one: dict[str, Any]) -> list[list[str]]:
    """Return the pooled reduction of JS beside the control's, slice by slice."""
    rows: list[list[str]] = []
    for part in one["slices"]:
        clamped, control = part["clamped"], part["control"]
        mean, above = TABLE_4[part["name"]]
        cells = [part["name"], ranged(clamped["pooled"], "value", "+.3f")]
        cells += [f"{control['pooled']['value']:+.1f}", f"{clamped['mean']['value']:+.3f}"]
        cells.append(f"{clamped['share_positive']:.2f}")
        if one["name"] == "protot":
            cells += [f"{mean:+.3f}", f"{above:.2f}"]
        rows.append(cells)
    return rows


def _claims(claims: Sequence[Claim], found: dict[str, Any]) -> list[list[str]]:
    """Return a row for each claim: in how many slices paired intervals show it, by measure."""
    return [
        [
            claim.said,
            "; ".join(
                f"{words} {_verdict(_differences(claim, found, key))}"
                for key, words in claim.measures.items()
            ),
        ]
        for claim in claims
    ]


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


def _verdict(intervals: dict[str, tuple[float, float]]) -> str:
    """Return in how many slices the claim is shown, bold if in all, and the opposite."""
    shown = sum(high < 0 for _, high in intervals.values())
    opposite = sum(low > 0 for low, _ in intervals.values())
    text = f"{shown} of {len(intervals)}"
    text = f"**{text}**" if shown == len(intervals) else text
    return f"{text} (opposite {opposite})" if opposite else text


def _counts(one: dict[str, Any]) -> dict[str, int]:
    """Return in how many slices clamping lowers JS, and more than a random text's routing."""
    judged = [part for part in one["slices"] if part["gain"] is not None]
    return {
        "slices": len(judged),
        "lower": sum(part["clamped"]["pooled"]["low"] > 0 for part in judged),
        "better": sum(part["gain"]["low"] > 0 for part in judged),
    }
