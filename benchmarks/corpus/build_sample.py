"""Choose the bundled sample from a directory of source Parquet sets, and count what was taken.

    python -m benchmarks.corpus.build_sample SETS_DIRECTORY

Only sets that may be passed on without share-alike terms are drawn from. Texts are whole and
unchanged; titles and arXiv addresses are filled in from the text and the id. The set of arXiv's
abstracts has been read as if numbers of papers were floats: what that did to ids is mended.
``ATTRIBUTION.md`` beside the sample credits every source, with the counts that this prints.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.shared.options import script_options
from prismlm.corpus.layout import is_held_out

Row = dict[str, Any]

SEED = "prismlm sample 1"
CHARACTERS_PER_DOMAIN = 1_060_000
SHORTEST, LONGEST = 300, 25_000
COLUMNS = ("id", "text", "domain", "source", "license", "title", "url", "split")
# What a corpus holds out unless it is told otherwise.
HELDOUT_FRACTION = 0.05
TARGET = Path(__file__).parents[2] / "src" / "prismlm" / "corpus" / "sample"


def _openstax(domain: str) -> Callable[[Row], bool]:
    # Chapter lists, credits and prefaces are not prose about the subject.
    return lambda row: row["domain"] == domain and not row["text"].startswith("Preface")


def _arxiv(pattern: str) -> Callable[[Row], bool]:
    return lambda row: re.match(pattern, row["source"]) is not None


def _clear_software_licence(row: Row) -> bool:
    text = row["text"]
    if row["source"] == "python-peps":
        return "placed in the public domain" in text or "CC0-1.0" in text
    if row["source"] == "ethereum-eips":
        return "waived via CC0" in text
    return row["source"] in ("cpp-docs", "powershell-docs")


def _old_enough(row: Row) -> bool:
    return row["domain"] == "fiction" and (row["year"] or "").isdigit() and int(row["year"]) < 1928


def _anything(row: Row) -> bool:
    return True


# domain → (set, which rows, share of the domain's text)
RECIPE: dict[str, list[tuple[str, Callable[[Row], bool], float]]] = {
    "medicine": [("medical_medquad", _anything, 0.6), ("openstax", _openstax("medical"), 0.4)],
    "law": [("legal_au_fca", _anything, 1.0)],
    "finance": [("finance_fed", _anything, 0.7), ("openstax", _openstax("finance"), 0.3)],
    "software": [("tech_docs", _clear_software_licence, 1.0)],
    "government": [("web_gov", _anything, 1.0)],
    "children": [
        ("children_classic", _anything, 0.6),
        ("children_stories", lambda row: row["source"].startswith("fairytaleqa/"), 0.4),
    ],
    "fiction": [("books_classic", _old_enough, 1.0)],
    "history": [("openstax", _openstax("history"), 1.0)],
    "physics": [("science_arxiv_abstracts", _arxiv(r"arxiv/physics\.(?!med-ph|bio-ph)"), 1.0)],
    "biology": [("science_arxiv_abstracts", _arxiv(r"arxiv/q-bio"), 1.0)],
    "computer science": [("science_arxiv_abstracts", _arxiv(r"arxiv/cs\."), 1.0)],
    "mathematics": [("science_arxiv_abstracts", _arxiv(r"arxiv/math\."), 1.0)],
}


def _rank(row: Row) -> bytes:
    return hashlib.sha256(f"{SEED}\n{row['id']}".encode()).digest()


def choose(rows: list[Row], allowed: Callable[[Row], bool], characters: int) -> list[Row]:
    """Return rows in an order drawn from the seed until they hold this many characters."""
    chosen: list[Row] = []
    size = 0
    for row in sorted(filter(allowed, rows), key=_rank):
        length = len(row["text"])
        if SHORTEST <= length <= LONGEST and size + length <= characters:
            chosen.append(row)
            size += length
    return chosen


def arxiv_number(number: str) -> str:
    """Return the number of a paper as arXiv writes it, whether or not it has been through a float.

    Since 2007 it is YYMM and four digits, since 2015 five: zeros that were lost can be put back,
    and 1503.0099699999998 was 1503.00997.
    """
    if "/" in number:
        return number
    digits = 5 if float(number) >= 1501 else 4
    return f"{float(number):0{digits + 5}.{digits}f}"


def mended(row: Row) -> Row:
    """Return a row of the arXiv set with the id that the paper has.

    Ids decide what is held out, and models were trained while they were the set's own: where the
    paper's would move it, ``split`` keeps it in its part.
    """
    folder, _, number = row["id"].partition("/")
    identifier = f"{folder}/{arxiv_number(number)}"
    before, after = (is_held_out(name, HELDOUT_FRACTION) for name in (row["id"], identifier))
    kept = "heldout" if before else "train"
    return {**row, "id": identifier, "split": None if before == after else kept}


def _title(row: Row) -> str | None:
    if row["title"]:
        return row["title"].strip()
    if row["source"] == "ethereum-eips":
        return Path(row["id"]).stem.upper()
    if row["source"] == "python-peps":
        found = re.search(r"^PEP: (\d+)\nTitle: (.+)$", row["text"], re.MULTILINE)
        return f"PEP {found[1]}: {found[2].strip()}" if found else None
    first, _, rest = row["text"].partition("\n\n")
    return first.strip() if rest and len(first) <= 160 and "\n" not in first else None


def _finished(row: Row, domain: str) -> dict[str, str | None]:
    url = row["url"] or None
    if row["source"].startswith("arxiv/"):
        url = f"https://arxiv.org/abs/{arxiv_number(row['id'].partition('/')[2])}"
    return {**row, "domain": domain, "title": _title(row), "url": url, "split": None}


def build(sets: Path) -> list[dict[str, str | None]]:
    """Return the sample's rows, sorted by domain and by the id that they have in their set."""
    loaded: dict[str, list[Row]] = {}
    rows: list[dict[str, str | None]] = []
    for domain, parts in RECIPE.items():
        for name, allowed, share in parts:
            if name not in loaded:
                loaded[name] = pq.read_table(sets / f"{name}.parquet").to_pylist()
            chosen = choose(loaded[name], allowed, int(share * CHARACTERS_PER_DOMAIN))
            rows += [_finished(row, domain) for row in chosen]
    rows.sort(key=lambda row: (row["domain"] or "", row["id"] or ""))
    return [mended(row) if str(row["source"]).startswith("arxiv/") else row for row in rows]


def main() -> None:
    """Write the sample, and print what it holds."""
    parser = script_options(__doc__)
    parser.add_argument("sets", type=Path, help="directory of the source Parquet sets")
    rows = build(parser.parse_args().sets)
    table = pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in COLUMNS})
    TARGET.mkdir(parents=True, exist_ok=True)
    path = TARGET / "sample.parquet"
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=22,
        write_statistics=False,
        row_group_size=len(rows),
        data_page_size=1 << 26,
    )
    for column, part in (("source", 0), ("domain", None)):
        documents, characters = Counter[str](), Counter[str]()
        for row in rows:
            name = str(row[column]).split("/")[0] if part == 0 else str(row[column])
            documents[name] += 1
            characters[name] += len(str(row["text"]))
        for name, count in sorted(documents.items()):
            print(f"{name:20} {count:,} texts, {characters[name] / 1e6:.2f} M characters")
    print(f"{len(rows)} documents, {path.stat().st_size / 1e6:.2f} MB compressed")


if __name__ == "__main__":
    main()
