"""Which text a model is inspected on, and the opening of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from prismlm.cli.options import option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus import Corpus
    from prismlm.corpus.sequences import Sequences
    from prismlm.corpus.store import Split

# Of a model whose training rows are not known.
LENGTH = 256
Length = Annotated[int | None, option("T", "Tokens of a window (default: as trained).")]
Tokens = Annotated[int, option("N", "Tokens to read; 0 for all.", least=0)]


def corpus_of(model: Path, corpus: Path | None) -> Corpus:
    """Open a corpus, or the one that a model was trained on."""
    from prismlm.corpus import Corpus
    from prismlm.lens.training_corpus import training_corpus

    return training_corpus(model) if corpus is None else Corpus.open(corpus)


def open_both(
    path: Path, corpus: Path | None, split: Split, tokens: int, length: int | None
) -> tuple[PreTrainedModel, Sequences]:
    """Open a model and say what is to be read of which corpus."""
    from prismlm.corpus.sequences import Sequences
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.lens.training_corpus import trained_length
    from prismlm.models.checkpoint import read_checkpoint

    model, tokenizer = read_checkpoint(path)
    opened = corpus_of(path, corpus)
    check_tokenizer_of(opened, tokenizer, path.resolve().name)
    row = trained_length(path) or LENGTH if length is None else length
    return model, Sequences(opened, split, row, tokens or None)
