"""What prismlm index reads: a corpus that is there, or a dataset that is streamed into one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from prismlm.cli.corpus import print_amounts, stream_amounts
from prismlm.cli.format import count, duration, size
from prismlm.cli.output import print_json, print_rows
from prismlm.cli.signals import orderly_end
from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns
from prismlm.corpus.resumable import existing_corpus, stream_corpus
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from prismlm.index.build import IndexOptions
    from prismlm.index.dataset_estimate import DatasetIndexEstimate
    from prismlm.models.checkpoint import Checkpoint
    from prismlm.progress import Reporter

CORPORA = "corpora"


class Source(Protocol):
    """Where a corpus comes from."""

    @property
    def name(self) -> str:
        """What the corpus is called."""
        ...

    def corpus(self, *, wait: bool, progress: Reporter) -> Corpus:
        """Return the corpus, which may take long; ``wait`` for one that another process writes."""
        ...

    def estimate(self, checkpoint: Checkpoint, options: IndexOptions, *, as_json: bool) -> None:
        """Print what an index of it would cost."""
        ...


class DirectorySource:
    """A corpus directory."""

    def __init__(self, path: Path) -> None:
        self._corpus = Corpus.open(path)
        self.name = self._corpus.name

    def corpus(self, *, wait: bool, progress: Reporter) -> Corpus:
        """Return the corpus."""
        return self._corpus

    def estimate(self, checkpoint: Checkpoint, options: IndexOptions, *, as_json: bool) -> None:
        """Print what an index of it would cost."""
        _estimate(checkpoint, self._corpus, options, as_json=as_json)


class DatasetSource:
    """A dataset, which becomes a corpus with the model's tokenizer, in MODEL/corpora by default."""

    def __init__(
        self, model: Path, out: Path | None, dataset: HubDataset, columns: Columns
    ) -> None:
        parts = (dataset.label, dataset.config, dataset.split)
        self._out = out or model / CORPORA / "-".join(part for part in parts if part)
        self._model, self._dataset, self._columns = model, dataset, columns
        self.name = self._out.resolve().name

    def corpus(self, *, wait: bool, progress: Reporter) -> Corpus:
        """Return the corpus, building it where it is not there, or not whole."""
        with orderly_end():
            return stream_corpus(
                self._dataset,
                self._out,
                tokenizer=load_tokenizer(self._model),
                columns=self._columns,
                wait=wait,
                progress=progress,
            )

    def estimate(self, checkpoint: Checkpoint, options: IndexOptions, *, as_json: bool) -> None:
        """Print what building it, if it is not there, and an index of it would cost."""
        from prismlm.index.dataset_estimate import estimate_dataset_index

        tokenizer = load_tokenizer(self._model)
        there = existing_corpus(
            self._dataset, self._out, tokenizer=tokenizer, columns=self._columns
        )
        if there is not None:
            _estimate(checkpoint, there, options, as_json=as_json)
            return
        expected = estimate_dataset_index(
            checkpoint.model,
            checkpoint.sidecar.head,
            tokenizer,
            self._dataset,
            options,
            columns=self._columns,
        )
        print_json(asdict(expected)) if as_json else _print_expected(expected)


def _estimate(
    checkpoint: Checkpoint, corpus: Corpus, options: IndexOptions, *, as_json: bool
) -> None:
    from prismlm.index.estimate import estimate_index

    estimate = estimate_index(checkpoint.model, checkpoint.sidecar.head, corpus, options)
    if as_json:
        print_json(asdict(estimate))
        return
    print_rows(
        [
            ("documents", count(estimate.documents)),
            ("tokens", count(estimate.tokens)),
            ("speed", f"{count(estimate.tokens_per_second)} tokens/s"),
            ("time", f"about {duration(estimate.seconds)}"),
            ("memory", f"about {size(estimate.memory_bytes)}"),
            ("disk", f"about {size(estimate.disk_bytes)}"),
        ],
        last="Nothing was written.",
    )


def _print_expected(expected: DatasetIndexEstimate) -> None:
    time = "not known" if expected.seconds is None else f"about {duration(expected.seconds)}"
    at_most = "about" if expected.tokens is not None else "at most"
    rows = [(f"corpus: {name}", value) for name, value in stream_amounts(expected.corpus)]
    rows += [
        ("index: speed", f"{count(expected.tokens_per_second)} tokens/s"),
        ("index: time", time),
        ("index: memory", f"about {size(expected.memory_bytes)}"),
        ("index: disk", f"{at_most} {size(expected.disk_bytes)}"),
    ]
    print_amounts(rows, expected.unknown)
