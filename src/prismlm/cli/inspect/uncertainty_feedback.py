"""prismlm inspect uncertainty-feedback: whether a model uses the uncertainty fed back to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prismlm.cli import options as opt
from prismlm.cli.inspect.corpus_to_read import LENGTH, corpus_of
from prismlm.cli.options import TEXT_KINDS, option
from prismlm.cli.output import print_json, print_report
from prismlm.errors import InputError

if TYPE_CHECKING:
    from prismlm.probes.uncertainty_feedback import Sample

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE...", help=f"Texts in place of a corpus: {TEXT_KINDS}."),
]
Checks = Annotated[
    list[str] | None,
    option(
        "CHECK",
        "ablation, prefill, attention, hedging, mistakes or probe; may be repeated (default: all).",
    ),
]
Tokens = Annotated[int | None, option("T", "Tokens of each (default: of a training row, or 256).")]
SignalFrom = Annotated[
    Literal["passes", "recursion"],
    option(None, "The model's own codes: by passes, or by recursion, the true ones."),
]
Passes = Annotated[int | None, option("N", "Of --signal passes (default: the model's).")]
Temperature = Annotated[float, option("T", "Of what is written; 0 takes the top token.")]


def uncertainty_feedback(
    model: opt.Model,
    files: Files = None,
    corpus: opt.CorpusToRead = None,
    split: opt.Split = "heldout",
    text: Annotated[list[str] | None, option("TEXT", "A text to read; may be repeated.")] = None,
    text_column: Annotated[str, option("NAME", "Of texts in files.")] = "text",
    check: Checks = None,
    texts: Annotated[int, option("N", "Texts to read.")] = 64,
    tokens: Tokens = None,
    signal: SignalFrom = "passes",
    passes: Passes = None,
    permutations: Annotated[int, option("N", "Of the shuffled signal, for ablation.")] = 5,
    write: Annotated[int, option("N", "Tokens to write after each text, for hedging.")] = 48,
    temperature: Temperature = 1.0,
    steps: Annotated[int, option("K", "Tokens looked at after a step or a mistake.")] = 8,
    seed: opt.Seed = 0,
    as_json: opt.Json = False,
) -> None:
    """Show whether a model uses the uncertainty that is fed back to it.

    Each check stands beside a control. Reads held-out documents of the corpus that the model was
    trained on, or of another, or files, or single texts.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.lens.training_corpus import trained_length
    from prismlm.models.checkpoint import read_checkpoint
    from prismlm.models.positions import learned_positions
    from prismlm.probes import uncertainty_feedback as instrument

    if sum(map(bool, (files, text, corpus))) > 1:
        raise InputError("texts come from FILE..., --text or --corpus: give one of them.")
    opened, tokenizer = read_checkpoint(model)
    # One pass has the same code everywhere, which says nothing.
    own = max(2, instrument.feedback_of(opened).passes)
    options = instrument.InspectOptions(
        signal=instrument.Signal(signal, own if passes is None else passes),
        permutations=permutations,
        tokens=write,
        window=steps,
        steps=steps,
        temperature=temperature,
        seed=seed,
    )
    row = trained_length(model) or LENGTH
    if tokens is None:
        tokens = min(row, learned_positions(opened) or row)
    drawn = {"texts": texts, "tokens": tokens, "seed": seed}
    if files or text:
        sample = _given(files or [], text or [], text_column, tokenizer, drawn)
    else:
        from prismlm.corpus.tokenizer import check_tokenizer_of

        read = corpus_of(model, corpus)
        check_tokenizer_of(read, tokenizer, model.resolve().name)
        sample = instrument.corpus_sample(read, split, **drawn)
    name, progress = model.resolve().name, ConsoleReporter()
    report = instrument.inspect_uncertainty_feedback(
        opened, tokenizer, sample, check or [], name=name, options=options, progress=progress
    )
    print_json(report.to_dict()) if as_json else print_report(report)


def _given(
    files: list[Path], texts: list[str], column: str, tokenizer: Any, drawn: dict[str, int]
) -> Sample:
    """Return texts of files, or of the command line, as tokens of the model."""
    from prismlm.corpus.documents import Columns, Document
    from prismlm.corpus.read import DocumentReader
    from prismlm.probes.uncertainty_feedback import document_sample

    if files:
        name = files[0].name + (" …" if len(files) > 1 else "")
        documents = DocumentReader(files, Columns(text=column))
        return document_sample(documents, tokenizer, name=name, **drawn)
    given = [Document(str(number), text) for number, text in enumerate(texts)]
    return document_sample(given, tokenizer, name="--text", **drawn)
