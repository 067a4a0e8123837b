"""What a model's predictions over many texts rely on: one row per text, sums, and their files.

Texts are read in batches of windows from any of them, in the memory of one batch. The last part
turns the question round: where does one training document show up?
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prismlm.corpus.chat import asked_in, encode_chat
from prismlm.corpus.documents import Document
from prismlm.corpus.encode import around_text, encode_text
from prismlm.corpus.windows import document_windows
from prismlm.errors import InputError
from prismlm.explain.attribution import (
    Attribution,
    AttributionSum,
    ContextPrior,
    Support,
    attribute,
    joined,
    spread,
    support_counts,
)
from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import misfit, split_states
from prismlm.explain.subject import Subject
from prismlm.files import json_text, read_json, write_json
from prismlm.lens.cells import Where, normalised
from prismlm.lens.layout import GROUP_COLUMNS
from prismlm.lens.lens import Lens
from prismlm.lens.opened_model import check_embedded
from prismlm.models.seam import capture
from prismlm.models.watch import evaluating
from prismlm.outputs import output_files

MAX_DEFAULT_WINDOW = 1024
TOKENS_PER_BATCH = 1024
CORPUS_FIELDS = ("split", "documents", "tokens", "share_read", "trained_on")
# Lifts between this and its inverse are as usual.
USUAL = 0.8
MAX_KEYS = 20  # of each column and text; the rest is summed as "others"
MAX_TEXTS, MAX_DOCUMENTS = 20, 20
MIN_SHARE = 0.01  # of a document in a row
# Characters that identify a text; more in the lists, whose texts may begin alike.
OPENING, LISTED_OPENING = 120, 400
BATCH_ROWS = 256
# Bins of the explained share; what lies outside counts in the first or last.
LOWEST_BIN, SHARE_BIN, SHARE_BINS = -1.0, 0.001, 4000
SUMS_FILE, ARRAYS_FILE = "sums.json", "sums.safetensors"
TEXT, COUNT, FIGURE = pa.string(), pa.int64(), pa.float64()
# A row: its own figures, shares by each column, and documents.
OWN: dict[str, pa.DataType] = {
    **dict.fromkeys(("text_id", "opening"), TEXT),
    **dict.fromkeys(("tokens", "predictions"), COUNT),
    **dict.fromkeys(("ce", "explained_share", "unattributed", "elsewhere"), FIGURE),
    **{"support": TEXT, "support_score": FIGURE},
}
SHARES = pa.list_(pa.struct({"key": TEXT, "share": FIGURE}))
DOCUMENT: dict[str, pa.DataType] = {"doc_id": TEXT, "share": FIGURE}
DOCUMENT |= dict.fromkeys(("source", "domain", "license", "title"), TEXT) | {"position": COUNT}
SCHEMA = pa.schema(
    OWN
    | {
        f"{of}_{by}": kind
        for by in GROUP_COLUMNS
        for of, kind in (("by", SHARES), ("other", FIGURE))
    }
    | {"documents": pa.list_(pa.struct(DOCUMENT)), "other_documents": FIGURE}
)
# The row of a text without predictions, but for its name and length.
NOTHING: dict[str, Any] = {
    name: None if name in OWN else 0.0 if name.startswith("other_") else [] for name in SCHEMA.names
}


def window_of(models: Sequence[PrismLM], window: int | None = None) -> int:
    """Return a window that suits every model; by default the longest, up to 1,024 tokens."""
    longest = min((lm.context_length for lm in models if lm.context_length), default=None)
    if window is None:
        window = min(longest or MAX_DEFAULT_WINDOW, MAX_DEFAULT_WINDOW)
    if not 2 <= window <= (longest or window):
        most = "" if longest is None else f", and at most {longest}, which the model reads"
        raise InputError(f"a window of {window} tokens does not fit: expected at least 2{most}.")
    return window


@dataclass(frozen=True, eq=False)
class TextFigures:
    """What a model's predictions along one text rely on; of a chat, along its last answer."""

    document: Document  # the text
    ids: Tensor  # its tokens; each but the first is predicted
    losses: np.ndarray  # −log p of every prediction that counts, float32
    explained: np.ndarray  # the explained share at each, for the model's top token there
    attribution: Attribution | None  # of all of them; None without a lens or predictions

    @property
    def support(self) -> Support | None:
        """How well the corpus supports it; None if unknown, or if the head does not fit."""
        if self.attribution is None or misfit(float(np.median(self.explained))):
            return None
        subject = Subject(asked_in(self.document.messages or ""), self.attribution.lens)
        return self.attribution.support(subject.in_text if subject else None)


class _Window(NamedTuple):
    """Some tokens of a text, from ``start`` on; it gives the predictions ``rows`` of them."""

    document: Document
    text: Tensor  # the tokens of the whole text
    ids: Tensor
    start: int
    rows: slice
    first: int  # the first of these predictions that counts: a chat's context does not
    prior: ContextPrior | None  # of the text
    last: bool


# Of a window: losses and explained shares, [2, n], and what the predictions that count rely on.
_Figures = tuple[Tensor, list[Attribution]]


def read_texts(
    lm: PrismLM, documents: Iterable[Document], window: int | None = None
) -> Iterator[TextFigures]:
    """Yield the figures of every text, in order; the target of each prediction is the text's own.

    Windows begin every three quarters of one: a prediction comes from the earliest window that
    gives it a quarter of context, or its text's start.
    """
    figures, attributions = [torch.empty(2, 0)], list[Attribution]()
    for batch in _batches(_windows(lm, documents, window_of([lm], window))):
        predicting = [one for one in batch if one.rows.start < one.rows.stop]
        of_windows = iter(_run_batch(lm, predicting) if predicting else ())
        for one in batch:
            if one.rows.start < one.rows.stop:
                rows, relied_on = next(of_windows)
                figures.append(rows)
                attributions += relied_on
            if one.last:
                losses, explained = torch.cat(figures, 1).numpy()
                whole = joined(attributions) if attributions else None
                yield TextFigures(one.document, one.text, losses, explained, whole)
                figures, attributions = figures[:1], []


def _windows(lm: PrismLM, documents: Iterable[Document], size: int) -> Iterator[_Window]:
    """Cut texts and chats to windows; InputError for a token without an embedding."""
    prefix = around_text(lm.tokenizer)[0]
    zero, opening = np.zeros(1, dtype=np.int64), torch.tensor(prefix, dtype=torch.int64)
    for document in documents:
        if document.messages:
            tokens = encode_chat(lm.tokenizer, document.messages)
        else:
            tokens = encode_text(lm.tokenizer, document.text)
        check_embedded(lm.model, lm.tokenizer, tokens, lm.path, f"the text {document.doc_id!r}")
        text = torch.tensor(tokens, dtype=torch.int64)
        before = lm.answer_start(document.messages, text) if document.messages else 0
        prior = None if lm.lens is None else ContextPrior(lm.lens.cells)
        # The last token predicts no token of the text, so it gets no window of its own.
        predictions = len(text) - 1
        lengths = np.array([max(1, predictions)])
        grid = document_windows(zero, zero, lengths, size, size * 3 // 4, prefix)
        columns = (grid.start.tolist(), grid.length.tolist(), grid.skip.tolist())
        for start, length, skip in zip(*columns, strict=True):
            ids = text[start:][:length]
            if start:
                # As in an index, windows inside a text begin with the prefix of texts.
                ids = torch.cat([opening, ids[len(prefix) :]])
            rows = slice(skip, max(skip, min(length, predictions - start)))
            first, last = max(0, before - 1 - start - skip), start == columns[0][-1]
            yield _Window(document, text, ids, start, rows, first, prior, last)


def _batches(windows: Iterable[_Window]) -> Iterator[list[_Window]]:
    batch: list[_Window] = []
    widest = 0
    for window in windows:
        widest = max(widest, len(window.ids))
        if batch and widest * (len(batch) + 1) > TOKENS_PER_BATCH:
            yield batch
            batch, widest = [], len(window.ids)
        batch.append(window)
    if batch:
        yield batch


@torch.no_grad()
def _run_batch(lm: PrismLM, batch: list[_Window]) -> list[_Figures]:
    """Run the model once, and return the figures of each window: its logits are free again."""
    device, output = lm.model.device, lm.output_layer
    ids = pad_sequence([window.ids for window in batch], batch_first=True)
    attended = pad_sequence([torch.ones_like(window.ids) for window in batch], batch_first=True)
    with evaluating(lm.model), capture(lm.model) as seen:
        lm.model(input_ids=ids.to(device), attention_mask=attended.to(device), use_cache=False)
    assert seen.embedded is not None
    z, raw = (
        torch.cat([states[row, window.rows] for row, window in enumerate(batch)])
        for states in (seen.z, seen.embedded)
    )
    tokens, targets = (torch.cat([w.text[w.start + by :][w.rows] for w in batch]) for by in (0, 1))
    split = split_states(output, lm.head, z, tokens, targets.to(device), raw_logits=raw)
    top = output.parts(lm.head.prototypes, z.float(), split.routing, split.scores.top)
    figures = torch.stack([-split.scores.log_probabilities, top.explained_share]).cpu()
    split, end, found = split.cpu(), 0, list[_Figures]()
    for window in batch:
        size, attributions = window.rows.stop - window.rows.start, list[Attribution]()
        rows, counted = slice(end, end := end + size), range(window.first, size)
        if lm.lens is not None:
            carriers = spread(split[rows], lm.lens.cells, lm.lens.head, window.prior)
            attributions += [attribute(carriers.select(counted), lm.lens)] if counted else []
        found.append((figures[:, rows][:, window.first :], attributions))
    return found


class Audit:
    """The sums over all texts so far, and lists of those that stand out.

    ``where`` keeps matching text alone in the shares; the rest is ``elsewhere``. Texts longer than
    the window, by default all that the model reads up to 1,024 tokens, are split.
    """

    def __init__(
        self, lm: PrismLM, *, window: int | None = None, where: Where | None = None
    ) -> None:
        self.lm, self.lens = lm, lm.lens_for("training text to point to")
        self.model, self.window = str(lm.path), window_of([lm], window)
        self.where = normalised(where)
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

    def read(self, documents: Iterable[Document]) -> Iterator[dict[str, Any]]:
        """Yield one row per text, in order, with the columns that docs/attribution.md lists.

        ``ce`` and the shares are None for a text of one token, which has no prediction. The sums
        include the rows yielded so far.
        """
        return map(self._add, read_texts(self.lm, documents, self.window))

    def save(self, directory: Path) -> None:
        """Write the sums so far, for :meth:`add_saved`."""
        write_json(directory / SUMS_FILE, {"sums": self.sums, "listed": self._listed})
        save_file({"explained": self._explained, **self._sum.arrays()}, directory / ARRAYS_FILE)

    def add_saved(self, directory: Path) -> None:
        """Add the sums of another audit of the same model, lens and options."""
        saved = read_json(directory / SUMS_FILE)
        self.sums.update(saved["sums"])
        arrays = load_file(directory / ARRAYS_FILE)
        self._explained += arrays.pop("explained")
        self._sum.add_amounts(**arrays)
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
        count, opening = len(losses), text.document.opening[:LISTED_OPENING]
        self.sums.update({"texts": 1, "tokens": len(text.ids), "predictions": count})
        row: dict[str, Any] = NOTHING | {
            "text_id": text.document.doc_id,
            "opening": opening[:OPENING],
            "tokens": len(text.ids),
            "predictions": count,
        }
        if text.attribution is None:
            return row
        loss, score = float(losses.sum(dtype=np.float64)), support and support.score
        row |= {"ce": loss / count, "explained_share": float(np.median(explained))}
        row |= {"support": support and support.level, "support_score": score}
        row |= self._shares_of(text.attribution)
        self.sums.update({"loss": loss, **(support.sums if support else {})})
        self._sum.add(text.attribution)
        bins = (np.nan_to_num(explained) - LOWEST_BIN) / SHARE_BIN
        np.add.at(self._explained, bins.clip(0, SHARE_BINS - 1).astype(np.int64), 1)
        entry, rest = {"text_id": row["text_id"], "opening": opening}, row["unattributed"]
        self._list("least_attributed", rest, entry | {"share": rest})
        if self.where:
            matching = 1 - rest - row["elsewhere"]
            self._list("most_matching", matching, entry | {"share": matching})
        elif sources := row["by_source"]:
            self._list("most_matching", sources[0]["share"], entry | sources[0])
        if support is not None:
            self._list("least_supported", -support.score, entry | support._asdict())
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
            {name: getattr(document, name) for name in DOCUMENT}
            for document in attribution.documents(count, where)
        ]
        row["other_documents"] = float(sum(shares[count:]))
        return row

    def _list(self, name: str, amount: float, entry: dict[str, Any]) -> None:
        """Add a text to a list of those with the largest amounts; of equal ones the earliest."""
        rows = [*self._listed[name], (amount, entry)]
        self._listed[name] = sorted(rows, key=lambda row: -row[0])[:MAX_TEXTS]


def write_audit(rows: Iterable[dict[str, Any]], paths: Sequence[Path]) -> None:
    """Read all rows, and write them as .parquet, .jsonl or .csv, by the names of the files."""
    remaining = iter(rows)
    with output_files(*paths) as temporary, ExitStack() as writers:
        opened = [
            writers.enter_context(_writer(file, path.suffix.lower()))
            for path, file in zip(paths, temporary, strict=True)
        ]
        while batch := list(islice(remaining, BATCH_ROWS)):
            for write in opened:
                write(batch)


@contextmanager
def _writer(path: Path, ending: str) -> Iterator[Callable[[list[dict[str, Any]]], object]]:
    """Yield a function that writes rows: whole, or as .csv their own figures and largest shares."""
    if ending == ".parquet":
        with pq.ParquetWriter(path, SCHEMA, compression="zstd") as parquet:
            yield lambda rows: parquet.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if ending == ".jsonl":
            yield lambda rows: file.writelines(json_text(row) + "\n" for row in rows)
            return
        table, kinds = csv.writer(file), (*GROUP_COLUMNS, "document")
        table.writerow([*OWN, *(f"top_{kind}{part}" for kind in kinds for part in ("", "_share"))])
        yield lambda rows: table.writerows(map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[Any]:
    cells = [row[name] for name in OWN]
    for kind in (*(f"by_{column}" for column in GROUP_COLUMNS), "documents"):
        largest = row[kind][0] if row[kind] else {}
        cells += [largest.get("doc_id" if kind == "documents" else "key"), largest.get("share")]
    # A spreadsheet runs text that starts like a formula; a quote before it makes it text.
    formula = ("=", "+", "-", "@", "\t", "\r")
    return [f"'{one}" if isinstance(one, str) and one[:1] in formula else one for one in cells]


@dataclass(frozen=True)
class DocumentSources:
    """Where a document shows up."""

    doc_id: str
    source: str | None
    domain: str | None
    license: str | None
    title: str | None
    url: str | None
    # The prototypes with its positions in their cells, the fullest first, then by share:
    # prototype, name, the number of positions, and their share of the cell.
    cells: list[dict[str, Any]]
    # Σ usage_i · its share of cell i, relative to Σ usage_i: its share of the text near to an
    # average use of a prototype.
    neighbourhood: float
    base_rate: float  # its share of all positions of the lens

    def sentence(self, texts: Mapping[str, Any] | None = None) -> str:
        """Say how many times its share of the corpus its share in texts, or near answers, is."""
        title = " ".join((self.title or self.doc_id).split())
        subject = f"Predictions of the model come near to “{title}”"
        share, expected = self.neighbourhood, self.base_rate
        if texts is not None:
            subject = f"“{title}” is behind these texts"
            share, expected = texts["share"], self.base_rate * texts["traced"]
        if not share:
            none = "No prediction" if texts is None else "None of these texts"
            return f"{none} relies on “{title}”."
        lift = share / expected
        if USUAL < lift < 1 / USUAL:
            return f"{subject} about as often as usual for its length."
        return (
            f"{subject} {'more' if lift > 1 else 'less'} often than usual: {lift:,.1f} times as "
            "much as its share of the corpus suggests."
        )


def document_sources(lens: Lens, doc_id: str) -> DocumentSources:
    """Return the prototypes with a document in their cells."""
    check_document(lens, doc_id)
    document = lens.cells.document_number(doc_id)
    positions, sizes = lens.cells.cells_of(document, lens.num_prototypes)
    if not positions.any():
        raise InputError(
            f"none of the positions of the document {doc_id!r} was indexed: the lens {lens.name} "
            "keeps a sample of positions. An index with --positions 1 has every one."
        )
    usage, shares = np.nan_to_num(lens.prototypes["usage"].to_numpy()), positions / sizes.clip(1)
    fullest = np.lexsort((-shares, -positions))[: np.count_nonzero(positions)].tolist()
    return DocumentSources(
        **lens.cells.facts(document),
        cells=[
            {"prototype": i, "name": lens.names[i]}
            | {"positions": int(positions[i]), "share": float(shares[i])}
            for i in fullest
        ],
        neighbourhood=float(usage @ shares / max(usage.sum(), 1e-300)),
        base_rate=float(lens.cells.document_rates[document]),
    )


def check_document(lens: Lens, doc_id: str, or_also: str = "") -> None:
    """Refuse a document that the lens does not have: unknown, held out, or never indexed.

    ``or_also`` names what was expected beside an id.
    """
    if lens.cells.document_number(doc_id) >= 0:
        return
    corpus = lens.corpus
    if corpus is None or doc_id not in corpus.doc_ids:
        raise InputError(
            f"the lens {lens.name} has no document {doc_id!r}: expected the id of a document of "
            f"its corpus, as `prismlm explain --json` has it{or_also}."
        )
    held_out = corpus.doc_ids.index(doc_id) in corpus.split("heldout")
    raise InputError(
        f"the document {doc_id!r} is {'held out' if held_out else 'not held out'}, and the lens "
        f"{lens.name} was built of the corpus's {lens.meta.split} split: it was never indexed. "
        "`prismlm index --split all` indexes it too."
    )


def texts_that_rely(lm: PrismLM, doc_id: str, documents: Iterable[Document]) -> dict[str, Any]:
    """Return where a document has a share.

    ``texts`` has id, beginning and share of each such text, the largest share first; ``texts_read``
    counts all texts, and ``share`` is the document's in an average one, ``traced`` that of all.
    """
    check_document(lm.lens_for("document to find"), doc_id)
    sharing, read, traced = list[dict[str, Any]](), 0, 0.0
    for text in read_texts(lm, documents):
        if text.attribution is None:
            continue
        read += 1
        traced += text.attribution.traced
        if (share := text.attribution.document_share(doc_id)) > 0:
            facts = {"text_id": text.document.doc_id, "opening": text.document.opening[:OPENING]}
            sharing.append(facts | {"share": share})
    sharing.sort(key=lambda text: -text["share"])
    share = sum(text["share"] for text in sharing) / max(1, read)
    return {"texts": sharing, "texts_read": read, "share": share, "traced": traced / max(1, read)}
