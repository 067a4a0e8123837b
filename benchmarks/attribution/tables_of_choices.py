"""Tables of what was tried of evidence by position, for the page of attribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.attribution.methods.evidence import Choices
from benchmarks.attribution.search_text_before import least
from benchmarks.shared.pages import table_head
from prismlm.explain.positions import (
    CONCENTRATION,
    SAME_TOKEN,
    SPAN,
    STRAY,
    TEMPERATURE,
)

CHANGED = {
    "temperature": "T = {}",
    "doubt": "times 1 − p(y), what the model was sure of counts less",
    "cells": "cells: {}",
    "order": "cells in the order of the {} prototype",
    "spread": "evidence spread {}",
    "whitening": "states whitened",
    "signed": "other next tokens count against",
}


def text_before(result: dict[str, Any]) -> list[str]:
    """Return what was tried of the temperature, the text before and the token read last."""
    chosen = [TEMPERATURE, STRAY, CONCENTRATION, SPAN, SAME_TOKEN]
    tried = result["tried"]
    lines = [
        "## What is free: the temperature, the text before, and the token read last",
        "",
        "Small T keep to the nearest position, which finds the domain; large ones count all that "
        "has the token, which teaches it. The text before counts the more, the smaller ρ is (the "
        "probability that a prediction is of any domain; 1 takes domains out), the smaller C (in "
        "predictions, of documents; – takes them out) and the longer it counts (h, in "
        "predictions). A position after the same token as the prediction counts B times. *Choice* "
        "is the least, over recall, gain and own share, of what a row has "
        "there of the best row's figure; it is of one half of the questions, and the figures "
        "beside it are of the other. [LDS](retraining.md) is of a bank of small models. **Bold** "
        "is `explain`'s. T, ρ and C were the best choice among rows of B = 1 when this was first "
        "measured, with evidence attributed wherever a prototype's own cell has the predicted "
        f"token; {_best_without_token(tried)} h and B are no such choice: "
        "they were made with all of this table in view, since the judges disagree. Domains are "
        "named best with a long text before, retraining is foretold best with none; the token "
        "read last helps both, and costs in tail-patch. With 6 and 10 the goals of recall, "
        "tail-patch and own share are met, and that of LDS on the half that is shown here.",
        "",
        *table_head(
            "| T | ρ | C | h | B | choice | recall@10 | tail-patch | own share | accuracy | LDS |"
        ),
    ]
    for one, worst in zip(tried, least(tried).tolist(), strict=True):
        said = ["–" if value is None else f"{value:g}" for value in one["choice"]]
        if one["choice"][1:3] == [1, None]:
            said[3] = "–"
        if one["choice"] == chosen:
            said = [f"**{value}**" for value in said]
        found = one["report"]
        figures = f"{found['recall']:.3f} | {found['gain']:+.3f} | {found['own share']:.3f}"
        lines.append(
            f"| {' | '.join(said)} | {worst:.2f} | {figures} | {found['accuracy']:.3f} | "
            f"{found['LDS']:.3f} |"
        )
    return lines


def _best_without_token(tried: list[dict[str, Any]]) -> str:
    """Return what has the best choice among rows of B = 1, beside T, ρ and C as they are."""
    rows = [
        (worst, one["choice"])
        for one, worst in zip(tried, least(tried).tolist(), strict=True)
        if one["choice"][4] == 1
    ]
    own = max(worst for worst, choice in rows if choice[:3] == [TEMPERATURE, STRAY, CONCENTRATION])
    worst, (t, stray, concentration, *_) = max(rows)
    return (
        f"now T = {t:g}, ρ = {stray:g}, C = {concentration:g} have {worst:.2f} and they {own:.2f}."
    )


def left_open(found: dict[str, Any]) -> list[str]:
    """Return what was tried of the equation by brute force, one change at a time."""
    patched = {Choices(**one["choices"]): one for one in found["tail_patch"]["search"]}
    lines = [
        "### What else the equation leaves open",
        "",
        "By brute force over positions in memory, at T = 0.1 and in the 16 cells with the most "
        "evidence but where a row says otherwise. Recall on the half of the facts that was "
        "searched and on the other; tail-patch on the half of the predictions that was searched, "
        "where it was tried.",
        "",
        *table_head("| | recall@10, searched | other half | tail-patch | specific |"),
    ]
    for row in sorted(found["recall"], key=lambda row: -row["search"]):
        choices = Choices(**row["choices"])
        words = _changed(choices)
        if words is None:
            continue
        patch, gains = patched.get(choices), "– | –"
        if patch is not None:
            gains = f"{patch['gain']['mean']:+.3f} | {patch['specific']['mean']:+.3f}"
        lines.append(f"| {words} | {row['search']:.3f} | {row['report']:.3f} | {gains} |")
    return lines


def _changed(choices: Choices) -> str | None:
    """Return what differs from the first choice, in words; None for several differences."""
    first = Choices()
    if choices == first:
        return "as said"
    for name, words in CHANGED.items():
        value = getattr(choices, name)
        if choices == replace(first, **{name: value}):
            return words.format("every" if value is None else value)
    return None
