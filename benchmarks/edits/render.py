"""Write docs/results/edits.md from edits.json; ``--check`` only compares the two."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.shared.pages import escaped, measured_on, page_options, publish, read_result

KINDS = {"edited": "edited", "control": "control", "plain": "without an edit", "removed": "removed"}


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "edits.json", "edits.measure")
    answers = answered(given.results / "edits_answers.jsonl")
    return publish({given.results / "edits.md": render(result, answers)}, check=given.check)


def answered(path: Path) -> dict[str, int]:
    """Return what a reader chose, by id; nothing where no one has read yet."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return {line["id"]: line["choice"] for line in lines}


def render(result: dict[str, Any], answers: dict[str, int]) -> str:
    """Return the page."""
    rows = result["texts"]
    removed = {row["words"] for row in rows if row["kind"] == "removed"}
    clamps, groups = ([row for row in rows if (row["words"] in removed) == of] for of in (0, 1))
    model = result["model"]
    lines = [
        "# Edits of the demo's model",
        "",
        f"**A clamped prototype's words show in {_of(clamps, 'edited', answers)} texts (control "
        f"{_of(clamps, 'control', answers)}, without an edit {_of(clamps, 'plain', answers)}); a "
        f"strengthened category shows in {_of(groups, 'edited', answers)} (control "
        f"{_of(groups, 'control', answers)}, without an edit {_of(groups, 'plain', answers)}).**",
        "",
        "Generated from `edits.json` and `edits_answers.jsonl` by "
        "`python -m benchmarks.edits.render`; the JSON by",
        "",
        "    prismlm demo --no-serve --out prismlm-demo",
        "    python -m benchmarks.edits.measure prismlm-demo/model "
        f"--prompts {result['prompts']} --tokens {result['tokens']}",
        "",
        f"K = {model['prototypes']:,}, k = {model['per_token']}. Of each subject "
        f"{result['prompts']} texts of {result['tokens']} tokens, the top token each time. The "
        "strength is the largest at which the text does not begin to repeat itself "
        "([edits](../edits.md#how-strong)); the control has the same strength on a random "
        "prototype of like usage, or on as many random prototypes as the category has.",
        "",
        "*Recognised*: texts in which a reader that was given ids alone chose the edited subject "
        "out of four or none; guessing among four gives 25 %. *Repeated*: share of 3-grams that "
        "occurred before, less that without an edit. *KL*: from the prediction without the edit to "
        "that with it, nats per token. *Changed*: share of different tokens that only one of "
        "both texts has.",
        "",
        *([] if answers else ["**No one has read these texts yet.**", ""]),
        measured_on(result["environment"]),
        "",
        "## Ten prototypes, clamped",
        "",
        "Of each of the most used categories in turn, the most used prototype whose card begins "
        "with a whole word.",
        "",
        *table(clamps, answers),
        "",
        "## Six categories",
        "",
        "Those with the most used prototypes: what the active members give is added, or taken out "
        "(*removed*, at −100 %).",
        "",
        *table(groups, answers),
        "",
        "## Prompts at which a category moves the text",
        "",
        "Of a fixed list, by the share of the evidence that the category carries there.",
        "",
        *(
            f"- {escaped(name)}: " + " · ".join(map(escaped, found))
            for name, found in result["moving"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, Any]], answers: dict[str, int]) -> list[str]:
    """Return a row for each subject, and one for all."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    read = "".join(f" recognised: {KINDS[kind]} |" for kind in kinds)
    head = f"| subject | strength |{read} repeated | control | KL | control | changed | control |"
    names = list(dict.fromkeys(row["words"] for row in sorted(rows, key=lambda row: row["words"])))
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    for name in [*names, None]:
        own = [row for row in rows if name in (None, row["words"])]
        of = {kind: [row for row in own if row["kind"] == kind] for kind in kinds}
        cells = [escaped(name) if name else "**all**", f"{average(of['edited'], 'strength'):.0%}"]
        cells += [recognised(of[kind], answers) for kind in kinds]
        for key, form in (("repeated", "+.1%"), ("kl", ".2f"), ("changed", ".0%")):
            cells += [format(average(of[kind], key), form) for kind in ("edited", "control")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def average(rows: list[dict[str, Any]], key: str) -> float:
    """Return the mean of a figure over texts."""
    return mean(row[key] for row in rows)


def _of(rows: list[dict[str, Any]], kind: str, answers: dict[str, int]) -> str:
    return recognised([row for row in rows if row["kind"] == kind], answers)


def recognised(rows: list[dict[str, Any]], answers: dict[str, int]) -> str:
    """Return in how many texts the reader chose the subject."""
    if not answers:
        return "–"
    right = sum(
        answers[row["id"]] > 0 and row["choices"][answers[row["id"]] - 1] == row["words"]
        for row in rows
    )
    return f"{right} of {len(rows)}"


if __name__ == "__main__":
    raise SystemExit(main())
