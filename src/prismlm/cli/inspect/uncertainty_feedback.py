"""prismlm inspect uncertainty-feedback: whether a model uses the uncertainty fed back to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from prismlm.cli.inspect.corpus_to_read import LENGTH, CorpusToRead, corpus_of
from prismlm.cli.options import TEXT_KINDS, Json, Model, Split, choice, option
from prismlm.cli.output import print_json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.store import Split as SplitName
    from prismlm.instruments.uncertainty_feedback import Sample, Signal

TEXTS = 64
SIGNALS = ("passes", "recursion")
Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE...", help=f"Texts in place of a corpus: {TEXT_KINDS}."),
]
Checks = Annotated[
    list[str] | None,
    option(
        "CHECK",
        "ablation, prefill, attention, hedging, mistakes or probe; may be repeated "
        "(default: all that model and texts allow).",
    ),
]
Tokens = Annotated[
    int | None,
    option("T", "Tokens of each (default: of a training row, or 256)."),
]
SignalFrom = Annotated[
    str,
    choice("HOW", "The model's own codes: by passes, or by recursion, the true ones.", SIGNALS),
]
Passes = Annotated[
    int | None,
    option("N", "Of --signal passes (default: the model's, at least 2)."),
]
Temperature = Annotated[float, option("T", "Of what is written; 0 for the likeliest token.")]


def uncertainty_feedback(
    model: Model,
    files: Files = None,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    text: Annotated[list[str] | None, option("TEXT", "A text to read; may be repeated.")] = None,
    text_column: Annotated[str, option("NAME", "Of texts in files.")] = "text",
    check: Checks = None,
    texts: Annotated[int, option("N", "Texts to read.")] = TEXTS,
    tokens: Tokens = None,
    signal: SignalFrom = "passes",
    passes: Passes = None,
    permutations: Annotated[int, option("N", "Of the shuffled signal, for ablation.")] = 5,
    write: Annotated[int, option("N", "Tokens to write after each text, for hedging.")] = 48,
    temperature: Temperature = 1.0,
    steps: Annotated[int, option("K", "Tokens looked at after a step or a mistake.")] = 8,
    seed: Annotated[int, option("S", "Of all that is drawn.")] = 0,
    as_json: Json = False,
) -> None:
    """Show whether a model uses the uncertainty that is fed back to it.

    Each check stands beside a control. Reads held-out documents of the corpus that the model was
    trained on, or of another, or files, or single texts.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments import uncertainty_feedback as instrument
    from prismlm.models.checkpoint import read_checkpoint

    if sum(map(bool, (files, text, corpus))) > 1:
        raise InputError("texts come from FILE..., --text or --corpus: give one of them.")
    opened, tokenizer = read_checkpoint(model)
    options = instrument.InspectOptions(
        signal=_signal(opened, signal, passes),
        permutations=permutations,
        tokens=write,
        window=steps,
        steps=steps,
        temperature=temperature,
        seed=seed,
    )
    where = (corpus, split, files or [], text or [], text_column)
    length = _length(model, opened) if tokens is None else tokens
    sample = _sample(model, tokenizer, where, texts=texts, tokens=length, seed=seed)
    checks = check or []
    name, progress = model.resolve().name, ConsoleReporter()
    report = instrument.inspect_uncertainty_feedback(
        opened, tokenizer, sample, checks, name=name, options=options, progress=progress
    )
    from prismlm.cli.printing.tables import print_report

    print_json(report.to_dict()) if as_json else print_report(report)


def _sample(
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    where: tuple[Path | None, str, list[Path], list[str], str],
    **drawn: int,
) -> Sample:
    """Return texts of a corpus and split, of files, or given, as tokens of the model."""
    from prismlm.corpus.documents import Columns, Document
    from prismlm.corpus.read import DocumentReader
    from prismlm.corpus.tokenizer import check_tokenizer_of
    from prismlm.instruments.uncertainty_feedback import corpus_sample, document_sample

    corpus, split, files, texts, column = where
    if files:
        name = files[0].name + (" …" if len(files) > 1 else "")
        documents = DocumentReader(files, Columns(text=column))
        return document_sample(documents, tokenizer, name=name, **drawn)
    if texts:
        given = [Document(str(number), text) for number, text in enumerate(texts)]
        return document_sample(given, tokenizer, name="--text", **drawn)
    found = corpus_of(model, corpus)
    check_tokenizer_of(found, tokenizer, model.resolve().name)
    return corpus_sample(found, cast("SplitName", split), **drawn)


def _length(path: Path, model: PreTrainedModel) -> int:
    """Return the tokens of a training row, or fewer where the model has no positions for them."""
    from prismlm.index.training_corpus import trained_length
    from prismlm.models.positions import learned_positions

    row = trained_length(path) or LENGTH
    return min(row, learned_positions(model) or row)


def _signal(model: PreTrainedModel, kind: str, passes: int | None) -> Signal:
    from prismlm.instruments.uncertainty_feedback import Signal, feedback_of

    # One pass has the same code everywhere, which says nothing.
    own = max(2, feedback_of(model).passes)
    return Signal(cast("Any", kind), own if passes is None else passes)
