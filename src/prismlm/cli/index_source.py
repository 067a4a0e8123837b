"""A dataset that prismlm index reads: it is streamed into a corpus first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prismlm.corpus.datasets import HubDataset
from prismlm.corpus.documents import Columns
from prismlm.corpus.resumable import existing_corpus, stream_corpus
from prismlm.corpus.store import Corpus
from prismlm.corpus.tokenizer import load_tokenizer
from prismlm.run_state import orderly_end

if TYPE_CHECKING:
    from prismlm.cost import Cost
    from prismlm.index.build import IndexOptions
    from prismlm.models.checkpoint import Checkpoint
    from prismlm.progress import Reporter

CORPORA = "corpora"


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

    def estimate(self, checkpoint: Checkpoint, options: IndexOptions) -> Cost:
        """Return what building it, if it is not there, and an index of it would cost."""
        from prismlm.index.estimate import estimate_dataset_index, estimate_index

        tokenizer, columns = load_tokenizer(self._model), self._columns
        there = existing_corpus(self._dataset, self._out, tokenizer=tokenizer, columns=columns)
        model, head = checkpoint.model, checkpoint.sidecar.head
        if there is not None:
            return estimate_index(model, head, there, options)
        return estimate_dataset_index(
            model, head, tokenizer, self._dataset, options, columns=columns
        )
