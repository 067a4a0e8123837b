"""Questions and answers of PubMedQA as the chats that ``chats.py`` is measured on.

python -m benchmarks.attach.pubmed_chats medical_pubmed.parquet --chats chats.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

LONGEST_QUESTION, SHORTEST_ANSWER, LONGEST_ANSWER = 200, 150, 900


def main() -> None:
    """Write so many chats, in the order of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--chats", type=Path, default=Path("chats.jsonl"))
    parser.add_argument("--count", type=int, default=300)
    given = parser.parse_args()
    found = list(chats(pq.read_table(given.texts).to_pylist()))[: given.count]
    given.chats.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    print(f"wrote {given.chats}: {len(found)} chats")


def chats(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a chat of each row whose text is a question and, after an empty line, its answer.

    An answer is cut behind its last sentence that ends within the bound.
    """
    for row in rows:
        question, _, answer = (part.strip() for part in row["text"].partition("\n\n"))
        short = len(answer) < SHORTEST_ANSWER
        if not question.endswith("?") or len(question) > LONGEST_QUESTION or short:
            continue
        whole = answer[:LONGEST_ANSWER].rsplit(". ", 1)[0] + "."
        facts = {name: row[name] for name in ("id", "source", "domain", "license")}
        yield facts | {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": whole},
            ]
        }


if __name__ == "__main__":
    main()
