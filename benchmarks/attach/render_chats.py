"""Write docs/results/chats.md from its JSON; ``--check`` only compares the two."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.shared.pages import (
    escaped,
    measured_on,
    page_options,
    publish,
    read_result,
    table_head,
)
from prismlm.statistics import bootstrap

METHODS = {
    "explain": "documents of `explain`",
    "BM25": "BM25, the words of the answer",
    "another answer": "control: `explain` of another question's answer",
}
TOP = (1, 10)
SHOWN = 12


def main() -> int:
    """Render, or say whether the page is up to date."""
    given = page_options(__doc__).parse_args()
    result = read_result(given.results / "chats.json", "attach.chats")
    return publish({given.results / "chats.md": render(result)}, check=given.check)


def render(result: dict[str, Any]) -> str:
    """Return the page."""
    asked, chats = result["asked"], result["chats"]
    ranks = {name: np.array([row[name] for row in asked], dtype=np.float64) for name in METHODS}
    first = {name: float((found <= 1).mean()) for name, found in ranks.items()}
    lines = [
        "# Chats that a model was fine-tuned on",
        "",
        f"Asked {len(asked)} of the questions that it was fine-tuned on, the model's answer relies "
        f"most on the chat with that question for **{first['explain']:.0%}**, of {chats:,} chats; "
        f"the words of the same answers find it for {first['BM25']:.0%} (BM25), the documents of "
        f"another question's answer for {first['another answer']:.0%}. "
        f"{_above(ranks['explain'], ranks['BM25'])}",
        "",
        f"The chats are questions and answers of PubMedQA, {result['trained_tokens']:,} tokens, "
        "read once by LoRA (`prismlm attach --lora --weights cosine`). The model answers "
        f"each question with {result['tokens']} tokens, its top ones. Evidence is of the "
        "answer alone: the question itself, which stands in its chat word for word, names "
        "nothing. BM25 does not read it either; but answers repeat words of their "
        "questions, and words alone go far. A chat that is asked about is not "
        "proved to be the reason of the answer.",
        "",
        *table_head("| method | first | of the first ten | median rank |"),
    ]
    for name, title in METHODS.items():
        shares = [_share(ranks[name] <= top) for top in TOP]
        lines.append(f"| {title} | {' | '.join(shares)} | {np.median(ranks[name]):.0f} |")
    lines += [
        f"| chance | {1 / chats:.1%} | {10 / chats:.1%} | {(chats + 1) / 2:.0f} |",
        "",
        f"The first {SHOWN} that were drawn, with the rank of their own chat:",
        "",
        *table_head("| question | the model's answer | `explain` | BM25 |"),
        *map(_asked, asked[:SHOWN]),
        "",
        "Generated from `chats.json` by `python -m benchmarks.attach.render_chats`; "
        "`benchmarks/attach/chats.py` writes that and says how, from the chats to the model. "
        f"{measured_on(result['environment'])}",
    ]
    return "\n".join(lines) + "\n"


def _share(hits: np.ndarray) -> str:
    found = bootstrap(hits.astype(np.float64), seed=0)
    return f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"


def _above(ours: np.ndarray, words: np.ndarray) -> str:
    """Say whether more questions have their chat first by explain than by words."""
    found = bootstrap((ours <= 1).astype(np.float64) - (words <= 1), seed=0)
    span = f"{100 * found.low:+.0f} to {100 * found.high:+.0f} points, 95 % of a bootstrap"
    if found.low > 0:
        return f"Evidence is above words ({span})."
    if found.high < 0:
        return f"Evidence is **below words** ({span})."
    return f"Neither is shown to be above the other ({span})."


def _asked(row: dict[str, Any]) -> str:
    words = [escaped(" ".join(row[name].split())) for name in ("question", "answer")]
    return f"| {' | '.join(words)} | {row['explain']:g} | {row['BM25']:g} |"


if __name__ == "__main__":
    raise SystemExit(main())
