"""What a model's predictions over many texts rely on: one row per text, sums over all, files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prismlm.corpus.build import draw_sample, sample_corpus
from prismlm.corpus.layout import strings
from prismlm.cost import Cost, peak_memory, rate_of
from prismlm.errors import FormatError, InputError
from prismlm.explain.attribution import Attribution, AttributionSum
from prismlm.explain.positions import Method
from prismlm.explain.summary import fits
from prismlm.explain.support import SupportCount
from prismlm.explain.texts import OnPass, TextFigures, TextOptions, read_texts
from prismlm.files import json_text
from prismlm.lens.layout import GROUP_COLUMNS, key_of
from prismlm.lens.lens import Lens
from prismlm.lens.where import Where, normalised
from prismlm.outputs import output_files

if TYPE_CHECKING:
    from prismlm.corpus.documents import Document
    from prismlm.corpus.read import DocumentReader
    from prismlm.explain.language_model import PrismLM

OF_A_LENS = ("split", "documents", "tokens", "trained_on")
KEYS_KEPT = 20  # of each column and text; the rest is summed as "others"
TEXTS_LISTED = 20
DOCUMENTS_LISTED = 20
LEAST_SHARE = 0.01  # of a document that a row names
# Characters of a text that say which it is; more of those listed, which may begin alike.
OPENING, OPENING_LISTED = 120, 400
# Explained shares are counted in bins of 0.001, so that their median needs no list of all.
BINS_FROM, BINS_TO, BINS = -1.0, 3.0, 4000
MISFIT = (
    "The prototype head does not fit this model: the median explained share is not one that a "
    "working head has, from 0% to 100%. Attach a new one."
)
ROWS_AT_ONCE = 256
IDENTITY_KEY = b"prismlm.audit"
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
    """The sums over all texts; its size depends on the lens and not on how many texts there are.

    Attributes:
        texts: how many were read.
        tokens, predictions: over all texts.
    """

    def __init__(
        self,
        lm: PrismLM,
        options: TextOptions,
        where: Where | None = None,
        least_share: float = LEAST_SHARE,
    ) -> None:
        self.lens = lm.lens_for("training text to point to")
        self.model, self.options = str(lm.path), options
        self.where, self.least_share = normalised(where), least_share
        self.texts = self.tokens = self.predictions = 0
        self._lm = lm
        self._loss = 0.0
        self._explained = np.zeros(BINS, dtype=np.int64)
        self._sum = AttributionSum(self.lens, options.method)
        self._support = SupportCount()
        # The texts that stand out, each with the amount that they are ordered by.
        names = ("least_supported", "least_attributed", "most_matching")
        self._listed = {name: list[tuple[float, dict[str, Any]]]() for name in names}
        if self.where:
            # A filter that matches no text is refused before the work.
            self.attribution().sources(where=dict(self.where))

    @property
    def identity(self) -> dict[str, str]:
        """What ties the files of this audit to its model, lens and least share."""
        least = f"{self.least_share:g}"
        return audit_identity(self.lens, self.options.method) | {"least_share": least}

    def read(
        self, documents: Iterable[Document], on_pass: OnPass | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield one row per text, in order; the sums hold those that were yielded.

        A row has the columns of the report, as docs/attribution.md lists them; ``ce`` and the
        shares are None for a text of one token, which predicts nothing.

        Args:
            documents: the texts.
            on_pass: is called after every forward pass; where it returns False, the reading ends
                there, without the texts that are not finished.

        Raises:
            DecompositionError: the parts of a logit do not sum to the model's own.
        """
        for text in read_texts(self._lm, documents, self.options, on_pass):
            yield self._add(text)

    def attribution(self) -> Attribution:
        """Return what the predictions of all texts so far rely on."""
        return self._sum.result()

    def to_dict(self) -> dict[str, Any]:
        """Return the summary: shares of all predictions, documents and the texts that stand out."""
        whole, meta, where = self.attribution(), self.lens.meta, dict(self.where)
        explained = self._median_explained()
        about = {name: getattr(meta, name) for name in OF_A_LENS}
        return {
            "model": self.model,
            "lens": str(self.lens.path),
            "corpus": {"name": meta.corpus_name, "fingerprint": meta.corpus, **about},
            "method": self.options.method,
            "where": {column: list(values) for column, values in self.where},
            "least_share": self.least_share,
            "window": self.options.window,
            "stride": self.options.stride,
            "texts": self.texts,
            "tokens": self.tokens,
            "predictions": self.predictions,
            "ce": self._loss / self.predictions if self.predictions else None,
            "explained_share": explained,
            "notes": [] if explained is None or fits(explained) else [MISFIT],
            "shares": {by: whole.sources(by, where).to_dict() for by in GROUP_COLUMNS},
            "documents": [
                one.to_dict() | {"around": one.around}
                for one in whole.documents(DOCUMENTS_LISTED, where)
            ],
            "support": self._support.to_dict(),
            **{name: [entry for _, entry in rows] for name, rows in self._listed.items()},
        }

    def _add(self, text: TextFigures) -> dict[str, Any]:
        """Add a text to the sums, and return its row."""
        count, found, support = len(text.losses), text.attribution, text.support
        loss = float(text.losses.sum(dtype=np.float64))
        opening = text.document.opening[:OPENING_LISTED]
        self.texts += 1
        self.tokens += text.tokens
        self.predictions += count
        row: dict[str, Any] = dict.fromkeys(SCHEMA.names) | {
            "text_id": text.document.doc_id,
            "opening": opening[:OPENING],
            "tokens": text.tokens,
            "predictions": count,
            "ce": loss / count if count else None,
            "explained_share": float(np.median(text.explained)) if count else None,
            "support": support and support.level,
            "support_score": support and support.score,
            "documents": [],
            "other_documents": 0.0,
        }
        row |= {f"by_{column}": [] for column in GROUP_COLUMNS}
        row |= {f"other_{column}": 0.0 for column in GROUP_COLUMNS}
        if found is None:
            return row
        row |= self._shares_of(found)
        self._loss += loss
        self._sum.add(found)
        self._support.add(support)
        place = (np.nan_to_num(text.explained) - BINS_FROM) * (BINS / (BINS_TO - BINS_FROM))
        np.add.at(self._explained, place.clip(0, BINS - 1).astype(np.int64), 1)
        entry, rest = {"text_id": row["text_id"], "opening": opening}, row["unattributed"]
        self._list("least_attributed", rest, entry | {"share": rest})
        sources = row["by_source"]
        if self.where:
            matching = 1 - rest - row["elsewhere"]
            self._list("most_matching", matching, entry | {"share": matching})
        elif sources:
            self._list("most_matching", sources[0]["share"], entry | sources[0])
        if support is not None:
            about = {"level": support.level, "score": support.score}
            self._list("least_supported", -support.score, entry | about)
        return row

    def _shares_of(self, found: Attribution) -> dict[str, Any]:
        """Return what a row says of shares and documents."""
        where, row = dict(self.where), dict[str, Any]()
        for column in GROUP_COLUMNS:
            sources = found.sources(column, where)
            items = [{"key": one.key, "share": one.share} for one in sources.items]
            row[f"by_{column}"] = items[:KEYS_KEPT]
            row[f"other_{column}"] = sum(one["share"] for one in items[KEYS_KEPT:])
            row |= {"unattributed": sources.unattributed, "elsewhere": sources.elsewhere}
        shares = [one.share for one in found.sources("document", where).items]
        named = found.documents(sum(one >= self.least_share for one in shares), where)
        row["documents"] = [{name: getattr(d, name) for name in DOCUMENT.names} for d in named]
        row["other_documents"] = float(sum(shares[len(named) :]))
        return row

    def _list(self, name: str, amount: float, entry: dict[str, Any]) -> None:
        """Note a text among those with the largest amounts; of equal ones the earliest."""
        rows = [*self._listed[name], (amount, entry)]
        self._listed[name] = sorted(rows, key=lambda one: -one[0])[:TEXTS_LISTED]

    def _median_explained(self) -> float | None:
        total = int(self._explained.sum())
        if not total:
            return None
        middle = int(np.searchsorted(np.cumsum(self._explained), (total + 1) // 2))
        return BINS_FROM + (middle + 0.5) * (BINS_TO - BINS_FROM) / BINS


def audit_identity(lens: Lens, method: Method) -> dict[str, str]:
    """Return what ties an audit's file to the model and lens it was made with."""
    meta = lens.meta
    of_lens = {"lens": key_of(meta.files), "prototypes": meta.prototypes, "corpus": meta.corpus}
    return of_lens | {"method": method}


@contextmanager
def audit_files(
    paths: Sequence[Path], pages: Sequence[Path], identity: dict[str, str]
) -> Iterator[tuple[Callable[[dict[str, Any]], None], list[Path]]]:
    """Open files for rows, and temporary paths for pages, as :func:`prismlm.outputs.output_files`.

    Yielded are a function that adds a row, some hundred of which are written at a time, and the
    paths.

    Args:
        paths: of rows; the extension says the format: .parquet, .jsonl or .csv.
        pages: of files that the block itself writes.
        identity: what the rows were made with.
    """
    with output_files(*paths, *pages) as temporary, ExitStack() as writers:
        opened = [
            writers.enter_context(FORMATS[path.suffix.lower()](file, identity))
            for path, file in zip(paths, temporary, strict=False)
        ]
        waiting: list[dict[str, Any]] = []

        def flush() -> None:
            for write in opened:
                write(waiting)
            waiting.clear()

        def add(row: dict[str, Any]) -> None:
            waiting.append(row)
            if len(waiting) >= ROWS_AT_ONCE:
                flush()

        yield add, temporary[len(paths) :]
        flush()


# Writes some rows of an audit.
Write = Callable[[list[dict[str, Any]]], object]


@contextmanager
def _parquet(path: Path, identity: dict[str, str]) -> Iterator[Write]:
    schema = SCHEMA.with_metadata({IDENTITY_KEY: json_text(identity).encode()})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        yield lambda rows: writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))


@contextmanager
def _json_lines(path: Path, identity: dict[str, str]) -> Iterator[Write]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(json_text(row) + "\n" for row in rows)


@contextmanager
def _csv(path: Path, identity: dict[str, str]) -> Iterator[Write]:
    """A CSV has the same figures, and the largest share of each kind."""
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


def read_audit(path: Path) -> tuple[dict[str, str], Iterator[dict[str, Any]]]:
    """Return what an audit's Parquet was made with, and its rows as a stream.

    Raises:
        InputError: there is no such file.
        FormatError: it is damaged, or not an audit.
    """
    if not path.is_file():
        raise InputError(f"{path} is not a file: expected the Parquet of `prismlm audit`.")
    with _readable(path):
        schema = pq.read_schema(path)
        if IDENTITY_KEY not in (schema.metadata or {}) or not schema.equals(SCHEMA):
            raise FormatError(
                f"{path} is not the Parquet of `prismlm audit` of this version. Run the audit "
                "again."
            )
        return json.loads(schema.metadata[IDENTITY_KEY]), _rows(path)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with _readable(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE):
            yield from batch.to_pylist()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FormatError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{path} cannot be read ({error}). Run the audit again.") from error


def estimate_audit(audit: Audit, reader: DocumentReader) -> Cost:
    """Audit some of the texts for some seconds, and multiply; nothing is written.

    The figures are ``texts``, ``tokens`` and ``tokens_per_second``; disk is of the rows as Parquet.

    Raises:
        InputError: there is nothing to read.
    """
    sample, rows = draw_sample(reader), list[dict[str, Any]]()
    assert sample.scale is not None
    assert sample.num_documents is not None

    def read() -> Iterator[int]:
        for row in audit.read(sample.documents):
            rows.append(row)
            yield row["tokens"]

    rate = rate_of(read())
    with sample_corpus(sample, reader.tokenizer, 0.0) as corpus:  # pyright: ignore[reportArgumentType]
        tokens = sample.scale * (corpus.num_tokens - len(sample.documents))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), sink, compression="zstd")
    disk = round(sink.getvalue().size * sample.num_documents / len(rows))
    figures = {"texts": sample.num_documents, "tokens": round(tokens), "tokens_per_second": rate}
    # Memory does not grow with the number of texts.
    basis = f"Measured on {len(rows):,} of the texts."
    return Cost(tokens / max(rate, 1e-9), peak_memory(), disk, figures, basis=basis)
