"""What a model's predictions over many texts rely on: one row per text, sums, and their files."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from prismlm.corpus.layout import strings
from prismlm.explain.attribution import Attribution, AttributionSum
from prismlm.explain.prediction import misfit
from prismlm.explain.support import support_counts
from prismlm.explain.texts import TextFigures, read_texts, window_of
from prismlm.files import json_text, read_json, write_json
from prismlm.lens.cells import Where, normalised
from prismlm.lens.layout import GROUP_COLUMNS, key_of
from prismlm.outputs import output_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prismlm.corpus.documents import Document
    from prismlm.explain.language_model import PrismLM

CORPUS_FIELDS = ("split", "documents", "tokens", "share_read", "trained_on")
MAX_KEYS = 20  # of each column and text; the rest is summed as "others"
MAX_TEXTS = 20
MAX_DOCUMENTS = 20
MIN_SHARE = 0.01  # of a document in a row
# Characters that identify a text; more in the lists, whose texts may begin alike.
OPENING, LISTED_OPENING = 120, 400
BATCH_ROWS = 256
# Bins of the explained share; what lies outside counts in the first or last.
LOWEST_BIN, SHARE_BIN, SHARE_BINS = -1.0, 0.001, 4000
SUMS_FILE, ARRAYS_FILE = "sums.json", "sums.safetensors"
DOCUMENT = pa.schema(
    [
        ("doc_id", pa.string()),
        ("share", pa.float64()),
        *strings("source", "domain", "license", "title"),
        ("position", pa.int64()),
    ]
)
_SHARES = pa.list_(pa.struct([("key", pa.string()), ("share", pa.float64())]))
OWN = pa.schema(
    [
        *strings("text_id", "opening"),
        *[(name, pa.int64()) for name in ("tokens", "predictions")],
        *[(name, pa.float64()) for name in ("ce", "explained_share", "unattributed", "elsewhere")],
        ("support", pa.string()),
        ("support_score", pa.float64()),
    ]
)
# A row: its own figures, shares by each column, and documents.
SCHEMA = pa.schema(
    [
        *OWN,
        *[
            field
            for column in GROUP_COLUMNS
            for field in ((f"by_{column}", _SHARES), (f"other_{column}", pa.float64()))
        ],
        ("documents", pa.list_(pa.struct(list(DOCUMENT)))),
        ("other_documents", pa.float64()),
    ]
)


class Audit:
    """The sums over all texts so far, and lists of those that stand out.

    ``where`` keeps matching text alone in the shares; the rest is ``elsewhere``. Texts longer than
    the window, by default all that the model reads up to 1,024 tokens, are split.
    """

    def __init__(
        self, lm: PrismLM, *, window: int | None = None, where: Where | None = None
    ) -> None:
        self.lens = lm.lens_for("training text to point to")
        self.model, self.window = str(lm.path), window_of([lm], window)
        self.where, self._lm = normalised(where), lm
        # Texts, tokens, predictions, loss, and levels and score of support.
        self.sums: Counter[str] = Counter()
        # How many predictions have which explained share: memory is the same for any text.
        self._explained = np.zeros(SHARE_BINS, dtype=np.int64)
        self._sum = AttributionSum(self.lens)
        # Texts that stand out, each with the amount that it is ranked by.
        names = ("least_supported", "least_attributed", "most_matching")
        self._listed = {name: list[tuple[float, dict[str, Any]]]() for name in names}
        # A filter that matches no text is refused before the work.
        self.attribution().sources(where=dict(self.where))

    @property
    def identity(self) -> dict[str, str]:
        """The model and lens of this audit."""
        meta = self.lens.meta
        return {"lens": key_of(meta.files), "prototypes": meta.prototypes, "corpus": meta.corpus}

    def read(self, documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
        """Yield one row per text, in order, with the columns that docs/attribution.md lists.

        ``ce`` and the shares are None for a text of one token, which has no prediction. The sums
        include the rows yielded so far.
        """
        return map(self._add, read_texts(self._lm, documents, self.window))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._lm.tokenizer

    def save(self, directory: Path) -> None:
        """Write the sums so far, for :meth:`add_saved`."""
        write_json(directory / SUMS_FILE, {"sums": self.sums, "listed": self._listed})
        save_file({"explained": self._explained, **self._sum.arrays()}, directory / ARRAYS_FILE)

    def add_saved(self, directory: Path) -> None:
        """Add the sums of another audit of the same model, lens and options."""
        saved = read_json(directory / SUMS_FILE)
        self.sums.update(saved["sums"])
        arrays = load_file(directory / ARRAYS_FILE)
        self._explained += arrays["explained"]
        self._sum.add_arrays(arrays)
        for name, rows in saved["listed"].items():
            for amount, entry in rows:
                self._list(name, amount, entry)

    def attribution(self) -> Attribution:
        """Return what the predictions of all texts so far rely on."""
        return self._sum.result()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary: shares of all predictions, documents and the texts that stand out."""
        attribution, meta, where = self.attribution(), self.lens.meta, dict(self.where)
        counts = {name: self.sums[name] for name in ("texts", "tokens", "predictions")}
        explained = self._median_explained()
        fields = {name: getattr(meta, name) for name in CORPUS_FIELDS}
        return {
            "model": self.model,
            "lens": self.lens.address,
            "corpus": {"name": meta.corpus_name, "fingerprint": meta.corpus, **fields},
            "where": {column: list(values) for column, values in self.where},
            "window": self.window,
            **counts,
            "ce": self.sums["loss"] / counts["predictions"] if counts["predictions"] else None,
            "explained_share": explained,
            "notes": [] if explained is None else misfit(explained),
            "shares": {by: attribution.sources(by, where).to_dict() for by in GROUP_COLUMNS},
            "documents": [
                document.to_dict() | {"around": document.around}
                for document in attribution.documents(MAX_DOCUMENTS, where)
            ],
            "support": support_counts(self.sums),
            **{name: [entry for _, entry in rows] for name, rows in self._listed.items()},
        }

    def _median_explained(self) -> float | None:
        if not self._explained.any():
            return None
        cumulative = np.cumsum(self._explained)
        middle = int(np.searchsorted(cumulative, (cumulative[-1] + 1) // 2))
        return LOWEST_BIN + (middle + 0.5) * SHARE_BIN

    def _add(self, text: TextFigures) -> dict[str, Any]:
        """Add a text to the sums, and return its row."""
        losses, explained, support = text.losses, text.explained, text.support
        count, loss = len(losses), float(losses.sum(dtype=np.float64))
        opening = text.document.opening[:LISTED_OPENING]
        self.sums.update({"texts": 1, "tokens": len(text.ids), "predictions": count})
        row: dict[str, Any] = dict.fromkeys(SCHEMA.names) | {
            "text_id": text.document.doc_id,
            "opening": opening[:OPENING],
            "tokens": len(text.ids),
            "predictions": count,
            "ce": loss / count if count else None,
            "explained_share": float(np.median(explained)) if count else None,
            "support": support and support.level,
            "support_score": support and support.score,
        }
        row |= {name: [] for name in row if name.startswith("by_")} | {"documents": []}
        row |= {name: 0.0 for name in row if name.startswith("other_")}
        if text.attribution is None:
            return row
        row |= self._shares_of(text.attribution)
        self.sums.update({"loss": loss, **(support.sums if support else {})})
        self._sum.add(text.attribution)
        bins = (np.nan_to_num(explained) - LOWEST_BIN) / SHARE_BIN
        np.add.at(self._explained, bins.clip(0, SHARE_BINS - 1).astype(np.int64), 1)
        entry, rest = {"text_id": row["text_id"], "opening": opening}, row["unattributed"]
        self._list("least_attributed", rest, entry | {"share": rest})
        sources = row["by_source"]
        if self.where:
            matching = 1 - rest - row["elsewhere"]
            self._list("most_matching", matching, entry | {"share": matching})
        elif sources:
            self._list("most_matching", sources[0]["share"], entry | sources[0])
        if support is not None:
            level = {"level": support.level, "score": support.score}
            self._list("least_supported", -support.score, entry | level)
        return row

    def _shares_of(self, attribution: Attribution) -> dict[str, Any]:
        """Return the row's shares and documents."""
        where, row = dict(self.where), dict[str, Any]()
        for column in GROUP_COLUMNS:
            sources = attribution.sources(column, where)
            items = [{"key": item.key, "share": item.share} for item in sources.items]
            row[f"by_{column}"] = items[:MAX_KEYS]
            row[f"other_{column}"] = sum(item["share"] for item in items[MAX_KEYS:])
            row |= {"unattributed": sources.unattributed, "elsewhere": sources.elsewhere}
        shares = [item.share for item in attribution.sources("document", where).items]
        count = sum(share >= MIN_SHARE for share in shares)
        row["documents"] = [
            {name: getattr(document, name) for name in DOCUMENT.names}
            for document in attribution.documents(count, where)
        ]
        row["other_documents"] = float(sum(shares[count:]))
        return row

    def _list(self, name: str, amount: float, entry: dict[str, Any]) -> None:
        """Add a text to a list of those with the largest amounts; of equal ones the earliest."""
        rows = [*self._listed[name], (amount, entry)]
        self._listed[name] = sorted(rows, key=lambda row: -row[0])[:MAX_TEXTS]


def write_audit(rows: Iterable[dict[str, Any]], paths: Sequence[Path]) -> None:
    """Read all rows, and write them as .parquet, .jsonl or .csv."""
    remaining = iter(rows)
    with output_files(*paths) as temporary, ExitStack() as writers:
        opened = [
            writers.enter_context(FORMATS[path.suffix.lower()](file))
            for path, file in zip(paths, temporary, strict=True)
        ]
        while batch := list(islice(remaining, BATCH_ROWS)):
            for write in opened:
                write(batch)


# Writes some rows of an audit.
Write = Callable[[list[dict[str, Any]]], object]


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))


@contextmanager
def _json_lines(path: Path) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(json_text(row) + "\n" for row in rows)


@contextmanager
def _csv(path: Path) -> Iterator[Write]:
    """Write the figures and the largest share of each kind."""
    tops = [f"top_{kind}{part}" for kind in (*GROUP_COLUMNS, "document") for part in ("", "_share")]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*OWN.names, *tops])
        yield lambda rows: writer.writerows(map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[Any]:
    cells = [row[name] for name in OWN.names]
    for kind, key in [
        *((f"by_{column}", "key") for column in GROUP_COLUMNS),
        ("documents", "doc_id"),
    ]:
        largest = row[kind][0] if row[kind] else {}
        cells += [largest.get(key), largest.get("share")]
    # A spreadsheet runs text that starts like a formula; a quote before it makes it text.
    formula = ("=", "+", "-", "@", "\t", "\r")
    return [f"'{one}" if isinstance(one, str) and one[:1] in formula else one for one in cells]


FORMATS = {".parquet": _parquet, ".jsonl": _json_lines, ".csv": _csv}
