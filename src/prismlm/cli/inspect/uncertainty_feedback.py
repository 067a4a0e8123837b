"""prismlm inspect uncertainty-feedback: whether a model uses the uncertainty fed back to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismlm.cli.inspect.corpus_to_read import LENGTH, CorpusToRead, SplitToRead
from prismlm.cli.options import TEXT_KINDS, DryRun, Json, Model
from prismlm.cli.output import print_json
from prismlm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.instruments.uncertainty_feedback import InspectEstimate, Sample, UncertaintyReport

TEXTS = 64


Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE...", help=f"Texts in place of a corpus: {TEXT_KINDS}."),
]
Texts = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="A text to read; may be repeated.")
]
TextColumn = Annotated[str, typer.Option(metavar="NAME", help="Of texts in files.")]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CHECK",
        help="ablation, prefill, attention, hedging, mistakes or probe; may be repeated. Else "
        "all that model and texts allow.",
    ),
]
TextsToRead = Annotated[int, typer.Option(metavar="N", help="Texts to read.")]
Tokens = Annotated[
    int | None,
    typer.Option(metavar="T", help="Tokens of each; else of a training row, or 256."),
]
SignalFrom = Annotated[
    str,
    typer.Option(
        metavar="HOW", help="The model's own codes: by passes, or by recursion, the true ones."
    ),
]
Passes = Annotated[
    int | None,
    typer.Option(metavar="N", help="Of --signal passes; else the model's, at least 2."),
]
Permutations = Annotated[
    int, typer.Option(metavar="N", help="Of the shuffled signal, for ablation.")
]
Written = Annotated[
    int, typer.Option(metavar="N", help="Tokens to write after each text, for hedging.")
]
Temperature = Annotated[
    float, typer.Option(metavar="T", help="Of what is written; 0 for the likeliest token.")
]
Steps = Annotated[
    int, typer.Option(metavar="K", help="Tokens looked at after a step or a mistake.")
]
Seed = Annotated[int, typer.Option(metavar="S", help="Of all that is drawn.")]


def uncertainty_feedback(
    model: Model,
    files: Files = None,
    corpus: CorpusToRead = None,
    split: SplitToRead = "heldout",
    text: Texts = None,
    text_column: TextColumn = "text",
    check: Checks = None,
    texts: TextsToRead = TEXTS,
    tokens: Tokens = None,
    signal: SignalFrom = "passes",
    passes: Passes = None,
    permutations: Permutations = 5,
    write: Written = 48,
    temperature: Temperature = 1.0,
    steps: Steps = 8,
    seed: Seed = 0,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Show whether a model uses the uncertainty that is fed back to it.

    Each check stands beside a control. Reads held-out documents of the corpus that the model was
    trained on, or of another, or files, or single texts.
    """
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.instruments.uncertainty_feedback import (
        InspectOptions,
        estimate_inspection,
        inspect_uncertainty_feedback,
    )
    from prismlm.models.checkpoint import read_checkpoint

    if sum(map(bool, (files, text, corpus))) > 1:
        raise InputError("texts come from FILE..., --text or --corpus: give one of them.")
    opened, tokenizer = read_checkpoint(model)
    options = InspectOptions(
        signal=_signal(opened, signal, passes),
        permutations=permutations,
        tokens=write,
        window=steps,
        steps=steps,
        temperature=temperature,
        seed=seed,
    )
    source = _Source(model, corpus, split, files or [], text or [], text_column)
    sample = source.read(opened, tokenizer, texts, tokens, seed)
    checks = check or []
    if dry_run:
        _print_estimate(estimate_inspection(opened, sample, checks, options), as_json=as_json)
        return
    name = model.resolve().name
    report = inspect_uncertainty_feedback(
        opened, tokenizer, sample, checks, name=name, options=options, progress=ConsoleReporter()
    )
    _print_report(report, as_json=as_json)


class _Source:
    """Where texts come from."""

    def __init__(
        self,
        model: Path,
        corpus: Path | None,
        split: str,
        files: Sequence[Path],
        texts: Sequence[str],
        column: str,
    ) -> None:
        self.model, self.corpus, self.split = model, corpus, split
        self.files, self.texts, self.column = files, texts, column

    def read(
        self,
        opened: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        texts: int,
        tokens: int | None,
        seed: int,
    ) -> Sample:
        """Return the texts, each cut to so many tokens."""
        from prismlm.index.training_corpus import trained_length
        from prismlm.instruments.uncertainty_feedback import document_sample
        from prismlm.models.positions import learned_positions

        if tokens is None:
            row = trained_length(self.model) or LENGTH
            tokens = min(row, learned_positions(opened) or row)
        if not (self.files or self.texts):
            return self._from_corpus(tokenizer, texts, tokens, seed)
        from prismlm.corpus.documents import Columns, Document
        from prismlm.corpus.read import DocumentReader

        if self.files:
            documents = DocumentReader(list(self.files), Columns(text=self.column))
            name = self.files[0].name + (" …" if len(self.files) > 1 else "")
        else:
            documents = [Document(str(n), text) for n, text in enumerate(self.texts)]
            name = "--text"
        return document_sample(
            documents, tokenizer, texts=texts, tokens=tokens, seed=seed, name=name
        )

    def _from_corpus(
        self, tokenizer: PreTrainedTokenizerBase, texts: int, tokens: int, seed: int
    ) -> Sample:
        from typing import cast

        from prismlm.corpus import Corpus
        from prismlm.corpus.store import Split
        from prismlm.corpus.tokenizer import check_tokenizer_of
        from prismlm.index.training_corpus import training_corpus
        from prismlm.instruments.uncertainty_feedback import corpus_sample

        found = training_corpus(self.model) if self.corpus is None else Corpus.open(self.corpus)
        check_tokenizer_of(found, tokenizer, self.model.resolve().name)
        split = cast("Split", self.split)
        return corpus_sample(found, split, texts=texts, tokens=tokens, seed=seed)


def _signal(model: PreTrainedModel, kind: str, passes: int | None) -> Any:
    from prismlm.instruments.uncertainty_feedback import Signal
    from prismlm.instruments.uncertainty_feedback.signal import feedback_of

    own = feedback_of(model).passes
    if kind not in ("passes", "recursion"):
        raise InputError(f"--signal is {kind!r}: expected passes or recursion.")
    # One pass has the same code everywhere, which says nothing.
    wanted = max(2, own) if passes is None else passes
    return Signal("recursion" if kind == "recursion" else "passes", wanted)


def _print_report(report: UncertaintyReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report.to_dict())
        return
    from prismlm.cli.printing.uncertainty_feedback import print_uncertainty_feedback

    print_uncertainty_feedback(report)


def _print_estimate(found: InspectEstimate, *, as_json: bool) -> None:
    from dataclasses import asdict

    from prismlm.cli.format import count, duration, size

    if as_json:
        print_json(asdict(found))
        return
    rows = [
        ("checks", ", ".join(found.checks)),
        ("texts", f"{count(found.texts)}, {count(found.tokens)} tokens"),
        ("passes", f"{found.passes} over all texts, {count(found.steps)} single steps"),
        ("time", f"about {duration(found.seconds)}"),
        ("memory", f"about {size(found.memory_bytes)}"),
        ("disk", "none"),
    ]
    for name, value in rows:
        typer.echo(f"{name:<10}{value}")
