"""Sentences of WikiText-2, DailyDialog and AG News, detokenised."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.errors import FormatError, InputError
from prismlm.hub import fetching

MIN_WORDS, MAX_WORDS = 5, 20
# A text of DailyDialog is a list of turns.
COLUMNS = {
    "wikitext2": ("text",),
    "dailydialog": ("turns", "dialog", "utterances"),
    "ag_news": ("text",),
}
HUB: dict[str, dict[str, str]] = {
    "wikitext2": {"path": "Salesforce/wikitext", "name": "wikitext-2-v1"},
    "dailydialog": {
        "path": "li2017dailydialog/daily_dialog", "revision": "refs/convert/parquet",
    },
    "ag_news": {"path": "fancyzhx/ag_news"},
}  # fmt: skip
WELL_FORMED = re.compile(r"""[A-Z][A-Za-z0-9,.'"?!;:$%&-]*( [A-Za-z0-9,.'"?!;:$%&-]+)+[.?!]""")
ODD = re.compile(
    r"--| - |\.\.|http|www|&|\w;\w|\d: |[A-Za-z]\.com|[?!,;:]{2}|\b[A-Z]{2,} [A-Z]{2,}"
    r"|[a-z][.?!][A-Z]|\b(AP|AFP|Reuters|quot|lt|gt)\b|^[A-Z ,]+:"
    r"|'[A-Za-z]{3,}|'$| '|' |\b([A-Za-z]+) \2\b"
    r'|""|\b(the|a|an|of|and|to|in|for|with)[.?!]$'
    r"|(?<!')\b[b-hj-z]\b(?!')|,[A-Za-z]"
)
# Abbreviations, after which a full stop does not end a sentence.
TITLES = (
    "[A-Z]|Mr|Ms|Mrs|Dr|St|Jr|Sr|Lt|No|vs|Co|Gov|Sen|Rep|Gen|Inc|Corp|Prof|Capt|Ltd|Sgt|Jan|Feb|Aug"
    "|Sept|Oct|Nov|Dec"
)
NO_END = "".join(rf"(?<!\b{title}\.)" for title in TITLES.split("|"))
SENTENCE_END = re.compile(rf"(?<=[.?!]){NO_END} (?=[A-Z])")


def read_sentences(data: Path | None) -> dict[str, list[str]]:
    """Return the distinct sentences of each source, in the order of its texts.

    Args:
        data: a directory with ``wikitext2`` (its tokenised text files), ``dailydialog`` and
            ``ag_news`` (Parquet files); None for the hub.
    """
    sentences: dict[str, list[str]] = {}
    for source in HUB:
        texts = _from_hub(source) if data is None else _from_files(source, data)
        sentences[source] = list(dict.fromkeys(sentences_of(source, texts)))
        if not sentences[source]:
            raise FormatError(
                f"there are no sentences of {MIN_WORDS} to {MAX_WORDS} words in {source} of "
                f"{data or 'the hub'}: expected the corpus's own files."
            )
    return sentences


def sentences_of(source: str, texts: Iterable[str]) -> Iterator[str]:
    """Yield complete sentences of ordinary text, of 5 to 20 words."""
    split = SENTENCE_END.split if source == "ag_news" else _tokenised
    for text in texts:
        for sentence in split(text):
            words = sentence.count(" ") + 1
            complete = WELL_FORMED.fullmatch(sentence) and not ODD.search(sentence)
            if complete and MIN_WORDS <= words <= MAX_WORDS and sentence.count('"') in (0, 2):
                yield sentence


def _tokenised(text: str) -> list[str]:
    """Return the sentences of a tokenised text."""
    if text.startswith(" = ") or text.startswith("= "):
        return []
    text = re.sub(r"\b(Mr|Mrs|Ms|Dr|St) \.", r"\1.", text)
    parts = re.split(r"(?<= [.?!]) +|\n", f"{text.strip()}\n")
    return [detokenise(part) for part in parts if "<unk>" not in part]


def detokenise(text: str) -> str:
    """Return a text with normal spacing around punctuation."""
    text = re.sub(r" @(.)@ ", r"\1", text.replace("’", "'"))
    # A contraction may be split on both sides: I ' m.
    text = re.sub(r"(?i)\b([a-z]+) ?' ?(s|m|d|t|re|ve|ll)\b", r"\1'\2", text)
    text = re.sub(r"(?i)\b([a-z]+) (n't)\b", r"\1\2", text)
    text = re.sub(r' ?"\s*([^"]*?)\s*"', r' "\1"', text)
    text = re.sub(r"(\d) (%)", r"\1\2", re.sub(r"(\$) (\d)", r"\1\2", text))
    text = re.sub(r" +([,.;:?!])", r"\1", text)
    return re.sub(r"\s+", " ", text).strip()


def _from_files(source: str, data: Path) -> Iterator[str]:
    ending = "txt" if source == "wikitext2" else "parquet"
    files = sorted((data / source).glob(f"*.{ending}"))
    if not files:
        raise InputError(
            f"{data} has no {source}/*.{ending}, which sentences are taken from. Put it there, or "
            "leave --data out to read from the hub."
        )
    for path in files:
        try:
            if ending == "txt":
                yield from path.read_text(encoding="utf-8").splitlines()
            else:
                yield from _texts(source, pq.read_table(path), str(path))
        except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
            raise FormatError(f"{path} cannot be read: {error}.") from error


def _from_hub(source: str) -> Iterator[str]:
    import datasets

    load: Any = datasets.load_dataset
    for split in ("test",) if source == "ag_news" else ("validation", "test"):
        with fetching(source, "a directory that holds it"):
            table = load(**HUB[source], split=split).with_format("arrow")[:]
        yield from _texts(source, table, f"{HUB[source]['path']} ({split})")


def _texts(source: str, table: pa.Table, where: str) -> Iterator[str]:
    name = next((name for name in COLUMNS[source] if name in table.column_names), None)
    if name is None:
        raise FormatError(
            f"{where} has the columns {', '.join(table.column_names)}: expected "
            f"{' or '.join(COLUMNS[source])}, the texts of {source}."
        )
    for row in table.to_pylist():
        # A headline is not a sentence.
        headline = f"{row.get('title') or ''}. "
        yield from row[name] if isinstance(row[name], list) else [row[name].removeprefix(headline)]
