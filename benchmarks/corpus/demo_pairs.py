"""Choose the demo's question-answer pairs from MedQuAD.

    python -m benchmarks.corpus.demo_pairs medical_medquad.parquet

A section of a document, headed by a question, becomes a chat of one question and one answer: the
answer's first sentences that say something, as many as fit. Only topics with several such sections
are taken, so that an answer has other texts about its subject; at most one section of a kind. Every
seventh topic is held out, in no lens and never taught: for questions whose document is lacking.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SEED = "prismlm demo 2"
TARGET = Path(__file__).parents[2] / "src" / "prismlm" / "demo" / "shipped" / "pairs.parquet"
PAIRS, FEWEST, PER_TOPIC, HELD_OUT_EVERY = 1_000, 3, 5, 7
SHORTEST, LONGEST = 60, 200
# Sources written for patients come first, the two on rare diseases fill up.
RARE = ("medquad/GHR", "medquad/GARD")
KINDS = (
    (r"What is (?:\(are\) )?", "what"),
    (r"What causes ", "causes"),
    (r"What are the symptoms of ", "symptoms"),
    (r"What are the treatments for ", "treatments"),
    (r"Who is at risk for ", "risk"),
    (r"How to prevent ", "prevention"),
    (r"How to diagnose ", "diagnosis"),
    (r"What are the complications of ", "complications"),
    (r"What are the genetic changes related to ", "genes"),
    (r"What is the outlook for ", "outlook"),
)
# What is no prose: headings, lists, tables of links, sentences that point elsewhere.
UNUSABLE = re.compile(
    r"[a-z]coronary|youhave|[a-z]\)[a-z]|diarrhealoose|Key Points|"
    r"These resources address|[:•]|\s-\s|https?:|\bclick\b|\bsee\b|\bbelow\b|"
    r"\bfollowing\b|\(watch|NINDS|NHLBI|NIDDK|not fully understand|U\.S\.$|"
    # A heading that has run into its text.
    r"[a-z)] (?-i:Each|Many|The|There|Although|Some|Most|People|Your|If|In|A|An) [a-z]|"
    r"(?-i:^[A-Z][a-z]+ for [A-Z])",
    re.IGNORECASE,
)
# How a word is said: (BRONG-ko-PUL-mo-NAR-e).
SPOKEN = re.compile(r"\s\((?=[^)]*-)(?=[^)]*[a-z])[A-Za-z -]*[A-Z]{2,}[A-Za-z -]*\)")
# Sentences that would be true of nearly every disease, or that repeat the question.
EMPTY = re.compile(
    r"\?$|risk factor\.$|^These (?:and other )?(?:signs|symptoms)|^Signs and symptoms of .* depend|"
    r"\bdepends? on\b|\bbased on\b|\bvar(?:y|ies)\b|"
    r"\bexact\b.*\bcauses?\b|\bcauses?\b.*\b(?:unknown|not (?:well )?(?:known|understood))|"
    r"often don't know|\bsuspected\b|confirm the diagnosis|There is (?:currently )?no cure|"
    r"many parts of the body\.$|several different|Many things can|than others to|"
    r"^You can (?:take|prevent)|"
    r"first, your doctor|genetic testing|may include|healthcare professionals|"
    r"^(?:This|These|It|They|Such|Other|However|In these|For this)\b"
    r"(?=.*\b(?:condition|tests?)\.$)",
    re.IGNORECASE,
)
LONGEST_TITLE = 40
UNUSABLE_TITLE = re.compile(r" - |[:(]|\bHealth\b|\bTests?\b|^Diagnosis|Caregiving|^What |^Surviv")
# Words of titles that say nothing of the topic, up to the ending.
GENERAL = {"diseas", "syndro", "cancer", "disord", "infect", "with", "and", "chroni", "childh"}
COLUMNS = ("id", "source", "domain", "license", "title", "url", "split")

Row = dict[str, Any]


def sections(rows: list[Row]) -> Iterator[Row]:
    """Yield every section that is headed by a question of a known kind and has a usable answer."""
    for row in rows:
        title, *parts = row["text"].split("\n\n")
        if len(title) > LONGEST_TITLE or UNUSABLE_TITLE.search(title):
            continue
        for part in parts:
            question, _, text = part.partition("\n")
            question = re.sub(r"\?+$", "?", question.strip())
            kind = next((name for start, name in KINDS if re.match(start, question)), None)
            answer = shortened(text)
            if kind is None or answer is None or title.lower() not in question.lower():
                continue
            if not names_topic(title, answer):
                continue
            yield {
                "id": f"{row['id']}#{kind}",
                "source": row["source"],
                "domain": "medicine",
                "license": row["license"],
                "title": question,
                "url": row["url"],
                "topic": re.sub(r"[^a-z0-9]+", " ", title.lower()).strip(),
                "kind": kind,
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ],
            }


def names_topic(title: str, answer: str) -> bool:
    """Say whether an answer has a longer word of its topic, up to the ending."""
    stems = {word[:6] for word in re.findall(r"[a-z]{4,}", title.lower())}
    return any(stem in answer.lower() for stem in stems - GENERAL or stems)


def shortened(text: str) -> str | None:
    """Return the first whole sentences that say something and fit; None where they are no prose."""
    first = SPOKEN.sub("", " ".join(text.split("\n\n", 1)[0].split()))
    taken = ""
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", first):
        if EMPTY.search(sentence):
            if taken:
                break
            continue
        if len(taken) + len(sentence) + 1 > LONGEST or not sentence.endswith((".", "!")):
            break
        taken = f"{taken} {sentence}".strip()
    usable = len(taken) >= SHORTEST and taken[0].isupper() and not UNUSABLE.search(taken)
    return taken if usable else None


def chosen(found: list[Row]) -> list[Row]:
    """Return the pairs that are taught, then those of topics that are held out."""
    topics: dict[str, dict[str, Row]] = defaultdict(dict)
    answers: set[str] = set()
    for row in sorted(found, key=_rank):
        answer = row["messages"][1]["content"]
        if answer not in answers and row["kind"] not in topics[row["topic"]]:
            answers.add(answer)
            topics[row["topic"]][row["kind"]] = row
    rich = [list(rows.values())[:PER_TOPIC] for rows in topics.values() if len(rows) >= FEWEST]
    taught: list[Row] = []
    held_out: list[Row] = []
    for number, rows in enumerate(sorted(rich, key=lambda rows: (-len(rows), _rank(rows[0])))):
        (held_out if number % HELD_OUT_EVERY == 0 else taught).extend(rows)
        if len(taught) >= PAIRS:
            break
    return [{**row, "split": "train"} for row in taught] + [
        {**row, "split": "heldout"} for row in held_out
    ]


def _rank(row: Row) -> tuple[bool, bytes]:
    key = hashlib.sha256(f"{SEED}\n{row['id']}".encode()).digest()
    return row["source"] in RARE, key


def main() -> None:
    """Write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path, help="medical_medquad.parquet")
    args = parser.parse_args()
    rows = chosen(list(sections(pq.read_table(args.texts).to_pylist())))
    table = pa.table(
        {name: pa.array([row[name] for row in rows], pa.string()) for name in COLUMNS}
        | {"messages": [row["messages"] for row in rows]}
    )
    pq.write_table(table, TARGET, compression="zstd", compression_level=22)
    print(Counter((row["split"], row["source"]) for row in rows))
    print(Counter(row["kind"] for row in rows))
    print(len(rows), "pairs;", TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
