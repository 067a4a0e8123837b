"""Write docs/results/prompts.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

from benchmarks.attribution.judges.domain_share import paired_difference
from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    table_head,
)
from prismlm.demo.prompts import ANSWERED

KINDS = ("passages", "by_chance")
CHARACTERS = 90


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "prompts.json", "attribution.prompts")
    return publish({given.results / "prompts.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page.

    Raises:
        SystemExit: an entry is not judged.
    """
    asked = result["prompts"]
    entries = {kind: [one for row in asked for one in row[kind]] for kind in KINDS}
    if any(one["of_subject"] is None for found in entries.values() for one in found):
        raise SystemExit("prompts.json has entries that nobody judged: see attribution.prompts")
    wrong = {kind: sum(not one["of_subject"] for one in entries[kind]) for kind in KINDS}
    counts = {kind: len(entries[kind]) for kind in KINDS}
    own = {kind: sum(one["domain"] == row["domain"] for row in asked for one in row[kind])
           for kind in KINDS}  # fmt: skip
    shares = [
        {n: sum(one["of_subject"] for one in row[kind]) / len(row[kind])
         for n, row in enumerate(asked)} for kind in KINDS
    ]  # fmt: skip
    more = paired_difference(*shares)
    leading = sum(row["passages"][0]["of_subject"] for row in asked)
    lines = [
        "# Twelve questions, read: are the passages of the question's subject?",
        "",
        f"**{wrong['passages']} of {counts['passages']} passages "
        f"({wrong['passages'] / counts['passages']:.0%}) are not of the question's subject**; of "
        f"places drawn by chance, where the same token comes next, {wrong['by_chance']} of "
        f"{counts['by_chance']} ({wrong['by_chance'] / counts['by_chance']:.0%}). Passages are of "
        f"it more often by {more['difference']:.0%} ({more['low']:.0%} to {more['high']:.0%}, "
        "95 % of a bootstrap over questions).",
        "",
        f"The leading passage is of the subject for {leading} of {len(asked)} questions. By the "
        "documents' own labels, which no reader judged, "
        f"{own['passages']} passages and {own['by_chance']} places drawn by chance are of the "
        "question's domain.",
        "",
        f"The questions are the demo's. Its model answers with {ANSWERED} tokens, and these are "
        "explained; passages follow the answer where that leaves the subject. Judged is the "
        "sentence alone, by a language model that was not told which of the two kinds it is of: is "
        "it about the same thing as the question or its answer, or of the question's subject, such "
        "as any text of mathematics for *How do you prove*? In doubt, no. That is wider than being "
        "about the question's own topic, for the places drawn by chance as well. One reader; "
        "another may judge otherwise: all passages are below.",
        "",
        "Generated from `prompts.json` by `python -m benchmarks.attribution.render_prompts`; the "
        "JSON by `python -m benchmarks.attribution.prompts`, which writes the sheet that was "
        f"judged. {measured_on(result['environment'])} A model of "
        f"{result['model']['parameters']:,} parameters.",
        "",
        *table_head("| question | the model's answer | support | of the subject | by chance |"),
        *map(_answer, asked),
    ]
    for row in asked:
        lines += ["", f"## {_cell(row['prompt'])}", ""]
        lines += table_head("| of the subject | share | document | passage |")
        lines += [_row(one) for one in row["passages"]]
    return "\n".join(lines) + "\n"


def _answer(row: dict[str, Any]) -> str:
    found = [f"{sum(one['of_subject'] for one in row[k])} of {len(row[k])}" for k in KINDS]
    columns = (_cell(row["prompt"]), _cell(row["answer"]), row["support"], *found)
    return f"| {' | '.join(columns)} |"


def _row(one: dict[str, Any]) -> str:
    text = "*not quoted*" if one["sentence"] is None else _cell(_cut(one["sentence"]))
    verdict = "yes" if one["of_subject"] else "**no**"
    document = f"{_cell(one['doc_id'])}, {_cell(one['license'] or 'licence (unknown)')}"
    return f"| {verdict} | {one['share']:.1%} | {document} | {text} |"


def _cut(sentence: str) -> str:
    """Return so many characters of a sentence on either side of its marked token."""
    place = sentence.index("[")
    first, last = max(0, place - CHARACTERS), place + CHARACTERS
    return "…" * (first > 0) + sentence[first:last] + "…" * (last < len(sentence))


def _cell(text: str) -> str:
    return escaped(" ".join(text.split()))


if __name__ == "__main__":
    raise SystemExit(main())
