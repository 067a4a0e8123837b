"""The source's Tables 3 to 5, and verdicts on its claims, for ``prototype_mixer_robustness.md``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.shared.pages import ranged
from prismlm.eval.robustness import INTERVENTIONS, SLICES

FOLDER = "prototype_mixer/robustness"
NAMES = {"protot": "ProtoT", "llama": "LLaMA", "mamba2": "Mamba 2", "deltanet": "DeltaNet"}
MEASURES = {"overlap": "overlap", "spearman": "Spearman", "same_top": "same top"}
DIVERGENCES = {"js": "raw", "js_matched": "matched"}
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
    Claim("ProtoT's ranks change more than LLaMA's", "protot", "llama", INTERVENTIONS, MEASURES),
    Claim("ProtoT's ranks change more than Mamba's", "protot", "mamba2", INTERVENTIONS, MEASURES),
)


def figures(read: Callable[..., Any]) -> dict[str, Any]:
    """Return what was measured, and verdicts on the source's claims."""
    noise, flips = (read(f"{FOLDER}/{name}.json") for name in ("perturbations", "interventions"))
    files = [one for one in read(f"{FOLDER}/clamping-*.json") if "slices" in one]
    clamped = {NAMES.get(one["name"], one["name"]): one for one in reversed(files)}
    return {
        "noise": noise,
        "divergences": _divergences(noise),
        "flipped": _divergences(flips),
        "models": list(clamped),
        "clamped": _clamping(list(clamped.values())),
        "pairs": [part["clamped"]["pairs"] for one in files for part in one["slices"]],
        "protot": _counts(clamped["ProtoT"]),
        "claims": (_claims(NOISE, noise), _claims(FLIPS, flips)),
    }


def _divergences(found: dict[str, Any]) -> list[list[str]]:
    """Return the JS of each kind of change, a column for each model."""
    return [
        [
            part["name"],
            *(ranged(part["models"][m["name"]]["js"], "value", ".3f") for m in found["models"]),
        ]
        for part in found["slices"]
    ]


def _clamping(models: list[dict[str, Any]]) -> list[list[str]]:
    """Return the pooled reduction of JS and the control's, slice by slice and model by model."""
    rows: list[list[str]] = []
    for parts in zip(*(one["slices"] for one in models), strict=True):
        rows.append([parts[0]["name"]])
        for part in parts:
            rows[-1].append(ranged(part["clamped"]["pooled"], "value", "+.3f"))
            rows[-1].append(f"{part['control']['pooled']['value']:+.1f}")
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
