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
from prismlm.eval.judging.judges import wilson
from prismlm.explain.shares import WORTH_SHOWING

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
    answerable = [row for row in result["demo"] if _answerable(row)]
    shown = {o: _right([one for row in answerable for one in _seen(row, o)]) for o in ORDERS}
    first_five = _right([one for row in answerable for one in row["passages"]["prismlm"]])
    stated = [row for row in answered if row["states_the_facts"]]
    first_stated = _share(stated, lambda row: row["rank"]["prismlm"] == 1)
    lines = [
        "# Does the demo answer, and does it show where from?",
        "",
        f"**The demo's model states the document's facts in {right} of the answers to questions in "
        f"new words ({former['right'] / former['answers']:.0%} by the model of before); the "
        "document comes "
        f"first for {first['prismlm']} (BM25: {first['bm25']}), and for {first_stated} of those "
        f"that state its facts; support is strong for {strong} and none for {none} of what the "
        f"lens does not hold; and {shown['prismlm']} passages shown are about the answer's "
        f"subject (of the first five of each {first_five}; BM25: {shown['bm25']}).**",
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
        *_documents(answered),
        *_support(rows),
        *_shown(answered),
        *_passages(result["demo"]),
        *_names(),
        "",
        "Generated from `asked.json` by `python -m benchmarks.attribution.render_asked`; the JSON "
        f"by `python -m benchmarks.attribution.asked`. {measured_on(result['environment'])}",
    ]
    return "\n".join(lines) + "\n"


def _documents(answered: Sequence[dict[str, Any]]) -> list[str]:
    """Return how often the document that holds the answer stands first."""
    lines = [
        "## The document that holds the answer",
        "",
        *table_head("| answers | by | first | among five |"),
    ]
    stated = [row for row in answered if row["states_the_facts"]]
    others = [row for row in answered if not row["states_the_facts"]]
    for meaning, some in (
        ("asked", answered),
        ("that state the document's facts", stated),
        ("that do not", others),
    ):
        for order in ORDERS:
            one = _share(some, lambda row, o=order: row["rank"][o] == 1)
            five = _share(some, lambda row, o=order: row["rank"][o] <= PASSAGES)
            lines.append(f"| {len(some)} {meaning} | {NAMED[order]} | {one} | {five} |")
    for other in ORDERS[1:]:
        ahead = sum((row["rank"]["prismlm"] == 1) - (row["rank"][other] == 1) for row in answered)
        if ahead <= 0:
            lines += ["", f"It does not beat {NAMED[other]}: {ahead:+d} questions."]
    return lines


def _support(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["", "## Support", "", *table_head("| questions | strong | weak | none |")]
    stated = [row for row in rows if row.get("states_the_facts")]
    sets = [
        (meaning, [row for row in rows if row["set"] == name]) for name, meaning in SETS.items()
    ]
    sets.insert(1, ("of these whose answer states the document's facts", stated))
    for meaning, own in sets:
        shares = [_share(own, lambda row, v=v: _level(row) == v) for v in LEVELS]
        lines.append(f"| {len(own)} {meaning} | {' | '.join(shares)} |")
    return lines


def _shown(answered: Sequence[dict[str, Any]]) -> list[str]:
    """Return how many documents of those shown are of the question's own subject."""
    shares: dict[str, str] = {}
    for kind in ("shown", "first_five"):
        found = [
            _subject(name) == _subject(row["id"])
            for row in answered
            if row["support"] != "none"
            for name in row[kind]
        ]
        shares[kind] = f"{sum(found) / len(found):.0%} of {len(found)}"
    return [
        "",
        f"Of the documents shown for the {len(answered)} answers, {shares['shown']} are of the "
        f"question's own subject; of the first five of each, {shares['first_five']}. Shown are "
        f"those with a share of at least {WORTH_SHOWING:.0%} (chosen on the other questions), and "
        "none where support says none.",
    ]


def _subject(document: str) -> str:
    return document.split("#")[0]


def _passages(ten: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "",
        "## Passages",
        "",
        "Ten more questions: six that a pair answers, two that a plain text answers and two "
        "that nothing in the corpus does. Of the passages shown, so many are about the answer's "
        "own subject; in brackets, of the first five. BM25 has no share to choose by. The pairs "
        f"have {FEWEST} to {PER_TOPIC} on each subject:",
        "",
        *table_head(f"| question | answer | support | {' | '.join(NAMED.values())} |"),
    ]
    for row in ten:
        counts = [
            f"{_right(_seen(row, o))} ({sum(one['of_subject'] for one in row['passages'][o])})"
            for o in ORDERS
        ]
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


def _seen(row: dict[str, Any], order: str) -> list[dict[str, Any]]:
    """Return the passages that are shown of those found."""
    if order == "bm25":
        return row["passages"][order]
    return [one for one in row["passages"][order] if one["shown"] and row["support"] != "none"]


def _right(passages: Sequence[dict[str, Any]]) -> str:
    return f"{sum(one['of_subject'] for one in passages)} of {len(passages)}"


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
