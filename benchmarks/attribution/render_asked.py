"""Write docs/results/asked.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.attribution.asked import FOLDER, ORDERS, PASSAGES, questions
from benchmarks.corpus.demo_pairs import FEWEST, PER_TOPIC
from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    table_head,
)
from prismlm.demo.prompts import ABSENT
from prismlm.eval.judging.examination import wilson

SETS = {
    "answered": "answered in a document of the lens",
    "heldout": "answered in a document that was held out",
    "foreign": "of other subjects",
    "nonsense": "nonsense, and diseases that do not exist",
}
NAMED = {
    "prismlm": "prismlm",
    "unweighted": "all tokens alike",
    "bm25": "BM25 of question and answer",
}
LEVELS = ("strong", "weak", "none")


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "asked.json", "attribution.asked")
    return publish({given.results / "asked.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page.

    Raises:
        KeyError: an answer or a passage is not judged.
    """
    rows, former = result["questions"], result["former"]
    answered = [row for row in rows if row["set"] == "answered"]
    right = _share(answered, lambda row: row["states_the_facts"])
    first = {order: _share(answered, lambda row, o=order: row["rank"][o] == 1) for order in ORDERS}
    strong = _share(answered, lambda row: row["support"] == "strong")
    none = _share(
        [row for row in rows if row["set"] in ("heldout", "foreign")],
        lambda row: row["support"] == "none",
    )
    shown = {
        order: [one for row in result["demo"] if _answerable(row) for one in row["passages"][order]]
        for order in ORDERS
    }
    of_subject = {o: sum(one["of_subject"] for one in shown[o]) for o in ORDERS}
    lines = [
        "# Does the demo answer, and does it show where from?",
        "",
        f"**The demo's model states the document's facts in {right} of the answers to questions in "
        f"new words ({former['right'] / former['answers']:.0%} by the model of before); the "
        "document comes "
        f"first for {first['prismlm']} (BM25: {first['bm25']}), support is strong for {strong} of "
        f"them and none for {none} of what the lens does not hold, and "
        f"{of_subject['prismlm']} of {len(shown['prismlm'])} passages are about the answer's "
        f"subject (BM25: {of_subject['bm25']}).**",
        "",
        f"{len(rows)} questions, {len(answered)} of them answered by a question-answer pair that "
        "the model was taught and the lens holds. The bounds of support were chosen on "
        f"{len(questions('choose'))} others, and the weights of tokens on questions to a model of "
        "before, not on these. Whether an answer states the facts, and whether a passage names "
        f"or describes its subject, was judged by {result['reader']}, which was not told "
        "what was found by what; its instructions are in "
        "[judge_prompt.md](asked/judge_prompt.md), its answers in "
        "[judged.jsonl](asked/judged.jsonl). Intervals are 95 %.",
        "",
        "## The document that holds the answer",
        "",
        *table_head("| by | first | among five |"),
    ]
    for order in ORDERS:
        five = _share(answered, lambda row, o=order: row["rank"][o] <= PASSAGES)
        lines.append(f"| {NAMED[order]} | {first[order]} | {five} |")
    for other in ORDERS[1:]:
        ahead = sum((row["rank"]["prismlm"] == 1) - (row["rank"][other] == 1) for row in answered)
        if ahead <= 0:
            lines += ["", f"It does not beat {NAMED[other]}: {ahead:+d} questions."]
    lines += [*_support(rows), *_passages(result["demo"]), *_names()]
    lines += [
        "",
        "Generated from `asked.json` by `python -m benchmarks.attribution.render_asked`; the JSON "
        f"by `python -m benchmarks.attribution.asked`. {measured_on(result['environment'])}",
    ]
    return "\n".join(lines) + "\n"


def _support(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", "## Support", "", *table_head("| questions | strong | weak | none |")]
    for name, meaning in SETS.items():
        own = [row for row in rows if row["set"] == name]
        shares = [_share(own, lambda row, v=v: _level(row) == v) for v in LEVELS]
        lines.append(f"| {len(own)} {meaning} | {' | '.join(shares)} |")
    return lines


def _passages(ten: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Passages",
        "",
        "Ten more questions: six that a pair answers, two that a plain text answers and two "
        "that nothing in the corpus does. Of five passages each, so many are about the answer's "
        f"own subject. The pairs have {FEWEST} to {PER_TOPIC} on each subject:",
        "",
        *table_head(f"| question | answer | support | {' | '.join(NAMED.values())} |"),
    ]
    for row in ten:
        counts = [str(sum(one["of_subject"] for one in row["passages"][o])) for o in ORDERS]
        columns = (_cell(row["question"]), _cell(row["answer"]), row["support"], *counts)
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def _names() -> list[str]:
    judged = [json.loads(line) for line in (FOLDER / "names.jsonl").read_text("utf-8").splitlines()]
    shares = {
        by: [one["clear"] for one in judged if one["by"] == by] for by in ("reader", "embedded")
    }
    reader, ours = (f"{sum(shares[by])} of {len(shares[by])}" for by in shares)
    return [
        "",
        "## Names",
        "",
        f"Of prototypes drawn by seed, {reader} names that a large language model gave from cards "
        f"are clear to another reader, and borne out by the places; of those that `prismlm label` "
        f"gives without one, {ours}. The two were mixed, and the reader did not know of either "
        "([names.jsonl](asked/names.jsonl)).",
    ]


def _answerable(row: dict[str, Any]) -> bool:
    return row["topic"] not in ABSENT


def _level(row: dict[str, Any]) -> str:
    return row["support"] or "none"


def _share(rows: Sequence[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> str:
    count = sum(map(holds, rows))
    interval = wilson(count, len(rows))
    return f"{count / len(rows):.0%} ({interval.low:.0%} to {interval.high:.0%})"


def _cell(text: str) -> str:
    return escaped(" ".join(text.split()))


if __name__ == "__main__":
    raise SystemExit(main())
