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
        f"{_of(clamps, 'control', answers)}, without an edit {_of(clamps, 'plain', answers)}); "
        f"under a strengthened category {telling(groups, 'edited')} of the tokens are words of it "
        f"(control {telling(groups, 'control')}, without an edit {telling(groups, 'plain')}).**",
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
        *_of_clamps(clamps, result["curve"], answers),
        *_of_categories(groups, answers),
    ]
    return "\n".join(lines) + "\n"


def _of_clamps(
    clamps: list[dict[str, Any]], curve: list[dict[str, Any]], answers: dict[str, int]
) -> list[str]:
    return [
        "## Ten prototypes, clamped",
        "",
        "Of each of the most used categories in turn, the most used prototype whose card begins "
        "with a whole word.",
        "",
        *table(clamps, answers),
        "",
        "## How strong before a text repeats itself",
        "",
        "The same clamps at every step of the search, of each subject's first prompt: *repeated* "
        "as above, a mean over the subjects, and the share of texts in which it stays within the "
        "limit.",
        "",
        "| strength | repeated | within |",
        "|---|---|---|",
        *(
            f"| {one['strength']:.0%} | {one['repeated']:+.1%} | {one['within']:.0%} |"
            for one in curve
        ),
        "",
    ]


def _of_categories(groups: list[dict[str, Any]], answers: dict[str, int]) -> list[str]:
    return [
        "## Ten categories",
        "",
        "Those with the most used prototypes, at the prompts of a fixed list where they carry most "
        "of the evidence: the tokens that tell the category are raised, or all that its members "
        "give is taken out (*removed*, at −100 %). *Words*: share of tokens that come next "
        "in the category's cells at least twice as often as in all cells; they do not depend on "
        "the cards, by which the edit acts. *More*: texts with more of them than "
        "the text without an edit.",
        "",
        *words_table(groups),
        "",
        *table(groups, answers),
        "",
        "## Prompts at which a category moves the text",
        "",
        *(
            f"- {escaped(name)}: " + (" · ".join(map(escaped, moved)) or "none of those tried")
            for name in names_of(groups)
            for moved in [moving(groups, name)]
        ),
    ]


def names_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the subjects of some rows, in the order of the alphabet."""
    return sorted({row["words"] for row in rows})


def telling(rows: list[dict[str, Any]], kind: str) -> str:
    """Return the share of the tokens of texts that are words of their category."""
    return f"{average([row for row in rows if row['kind'] == kind], 'telling'):.1%}"


def moving(rows: list[dict[str, Any]], name: str) -> list[str]:
    """Return the prompts at which an edit of a category brings more of its words."""
    own = [row for row in rows if row["words"] == name]
    plain = {row["prompt"]: row["telling"] for row in own if row["kind"] == "plain"}
    edited = [row for row in own if row["kind"] == "edited"]
    return [row["prompt"] for row in edited if row["telling"] > plain[row["prompt"]]]


def words_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return how many words of it a category's texts have, a row for each and one for all."""
    lines = ["| category | words: edited | control | without an edit | removed | more |"]
    lines.append("|---|---|---|---|---|---|")
    for name in [*names_of(rows), None]:
        own = [row for row in rows if name in (None, row["words"])]
        cells = [telling(own, kind) for kind in ("edited", "control", "plain", "removed")]
        more = sum(len(moving(rows, one)) for one in names_of(own))
        texts = sum(row["kind"] == "edited" for row in own)
        label = escaped(name) if name else "**all**"
        lines.append(f"| {label} | {' | '.join(cells)} | {more} of {texts} |")
    return lines


def table(rows: list[dict[str, Any]], answers: dict[str, int]) -> list[str]:
    """Return a row for each subject, and one for all."""
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    read = "".join(f" recognised: {KINDS[kind]} |" for kind in kinds)
    head = f"| subject | strength |{read} repeated | control | KL | control | changed | control |"
    names = names_of(rows)
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
