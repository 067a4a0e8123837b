"""prismlm inspect spectra: coding rates, cross terms and the loss by length of context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from prismlm.cli.inspect.corpus_to_read import CorpusToRead, Length, open_both
from prismlm.cli.inspect.heads import print_header
from prismlm.cli.options import Json, Model, Split, flag, number, option
from prismlm.cli.output import console_for_reading, print_json, table_of

if TYPE_CHECKING:
    from prismlm.instruments.heads import LossAgainstLength, RatioTerms, SpectraReport


def spectra(
    model: Model,
    corpus: CorpusToRead = None,
    split: Split = "heldout",
    tokens: Annotated[
        int, number("N", "Tokens that positions are drawn from; 0 for all.")
    ] = 50_000,
    length: Length = None,
    positions: Annotated[int, option("N", "Positions of coding rates and of content.")] = 2048,
    distortion: Annotated[
        float, option("EPSILON", "Of coding rates; the source leaves it open.")
    ] = 0.5,
    order: Annotated[int, option("N", "Of small denominators: n and m from 1 to this.")] = 22,
    context: Annotated[
        int | None,
        option("T", "Tokens of a window of the loss (default: twice a row's)."),
    ] = None,
    documents: Annotated[int, option("N", "Documents that the loss is read of.")] = 32,
    seed: Annotated[int, option("N", "Of positions, documents and controls.")] = 0,
    loss_only: Annotated[
        bool, flag("--loss-only", "Only the loss by length; of any decoder.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show coding rates, incoherence, cross terms, and the loss beyond the trained length."""
    from prismlm.cli.progress import ConsoleReporter
    from prismlm.index.training_corpus import trained_length
    from prismlm.instruments.heads import SpectraOptions, spectra_report

    opened, sequences = open_both(model, corpus, split, tokens, length)
    report = spectra_report(
        opened,
        sequences,
        name=model.resolve().name,
        options=SpectraOptions(
            positions, distortion, order, context, trained_length(model), documents, seed
        ),
        loss_only=loss_only,
        progress=ConsoleReporter(),
    )
    print_json(report.to_dict()) if as_json else print_spectra(report)


def print_spectra(report: SpectraReport) -> None:
    """Print rates and incoherence by layer, cross terms by ratio, and loss by length."""
    console = console_for_reading()
    print_header(console, report.model, report.corpus)
    if report.rates:
        _print_rates(console, report)
    if report.cross_terms:
        _print_terms(console, report.cross_terms)
    if report.loss is not None:
        _print_loss(console, report.loss)
    else:
        console.print(f"No loss by length: {report.no_loss}")


def _print_rates(console: Console, report: SpectraReport) -> None:
    from prismlm.instruments.channels.wording import signed

    console.print("Coding rates, nats", style="bold")
    table = table_of(
        "*layer", "*R(Z)", "*R(Z|Us)", "*R(Z|Un)", "*ΔR", "*step", "*−stretch", "*−shuffled",
        "*cos", "*incoher.", "random", gap=1,
    )  # fmt: skip
    for rates in report.rates:
        apart = rates.incoherence
        table.add_row(
            str(rates.layer),
            f"{rates.before.whole:.1f}",
            f"{rates.before.signal:.1f}",
            f"{rates.before.noise:.1f}",
            f"{rates.before.difference:.1f}",
            signed(rates.gain, 2),
            signed(rates.gain_over_scaled, 2),
            signed(rates.gain_over_shuffled, 2),
            signed(rates.gradient_cosine, 2),
            f"{apart.own:.3f}",
            f"{apart.random:.3f}±{apart.random_deviation:.3f}",
        )
    console.print(table)
    raised = sum(rates.gain > 0 for rates in report.rates)
    beyond = sum(rates.gain_over_scaled > 0 for rates in report.rates)
    first = report.rates[0]
    console.print(
        f"One attention step raises ΔR in {raised} of {len(report.rates)} layers, and more than "
        f"stretching Z to the same size does in {beyond}. Random weights may do so too: of what "
        "training did this says nothing."
    )
    console.print(
        f"Of Z, what attention reads, at {first.positions:,} positions; ε {first.distortion:g}"
        f", λ {first.noise_weight:.3g}. step: what Z + η(S − λN) adds to ΔR; less what stretching "
        "Z to its size adds, and less what the steps of other positions add; cos: of the step "
        "with ∂ΔR/∂Z. incoher.: of the dictionaries, beside random ones.\n",
        style="dim",
    )


def _print_terms(console: Console, terms: Sequence[RatioTerms]) -> None:
    console.print("Cross terms", style="bold")
    table = table_of(
        "ratio", "scales", "*K_SN", "*K_SS", "*K_NN", "*normalised", "*no content", "*|nω−mω|",
        "n:m", "*later", "n:m", gap=1,
    )  # fmt: skip
    for one in terms:
        later = one.later_denominator
        name = f"own ({one.value:.3g})" if one.ratio == "own" else one.ratio
        table.add_row(
            name,
            one.scaling,
            *(f"{one.mean(t):.3g}" for t in ("signal_noise", "signal_signal", "noise_noise")),
            f"{one.normalised:.4f}",
            f"{one.position.normalised:.4f}",
            f"{one.denominator.value:.2g}",
            f"{one.denominator.n}:{one.denominator.m}",
            "–" if later is None else f"{later.value:.2g}",
            "–" if later is None else f"{later.n}:{later.m}",
            style="bold" if one.ratio == "own" else None,
        )
    console.print(table)
    console.print(least_in_step(terms))
    console.print(
        "Means over layers; normalised K_SN / √(K_SS K_NN), with this model's content and "
        "with none. Other ratios have the same content: what a model trained with them would do "
        "is another matter. |nω−mω|: the least, of a signal and a noise frequency; later: without "
        "each group's first pair.\n",
        style="dim",
    )


def least_in_step(terms: Sequence[RatioTerms]) -> str:
    """Return which ratios have the least normalised cross term, all that tie as it is shown."""
    others = [one for one in terms if one.ratio != "own"]
    least = min(f"{one.normalised:.4f}" for one in others)
    best = [
        f"ratio {one.ratio}, scaling the {one.scaling}"
        for one in others
        if f"{one.normalised:.4f}" == least
    ]
    return f"Least in step: {'; '.join(best)} ({least}{' each' if len(best) > 1 else ''})."


def _print_loss(console: Console, loss: LossAgainstLength) -> None:
    from prismlm.instruments.channels.wording import signed

    console.print("Loss by length of context", style="bold")
    control = any(bucket.difference is not None for bucket in loss.buckets)
    table = table_of(
        "*context", "*nats a token", *(["*read in rows", "*difference"] if control else [])
    )
    for bucket in loss.buckets:
        row = [
            str(bucket.low) if bucket.low == bucket.high else f"{bucket.low}–{bucket.high}",
            f"{bucket.loss:.3f}{_error(bucket.error)}",
        ]
        if control and bucket.difference is not None:
            assert bucket.short_loss is not None
            assert bucket.difference_error is not None
            row += [
                f"{bucket.short_loss:.3f}",
                f"{signed(bucket.difference, 3)}{_error(bucket.difference_error)}",
            ]
        table.add_row(*row)
    console.print(table)
    trained = loss.trained_length
    note = f"{loss.documents} documents, each from its start; ± standard error over them."
    if trained is None:
        note += " The trained length is not known."
    if control:
        note += (
            f" read in rows: the same tokens in windows of {trained:,}, as in training; "
            "a difference above 0 says that the longer context hurts."
        )
    console.print(note, style="dim")


def _error(value: float) -> str:
    return "" if math.isnan(value) else f" ± {value:.3f}"
