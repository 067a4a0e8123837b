"""What the heads of a model do over a text, as one report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from prismlm.corpus.sequences import CorpusPart, Sequences
from prismlm.errors import InputError, check_number, check_whole
from prismlm.files import finite
from prismlm.instruments.forward import documents_of
from prismlm.instruments.heads.comparison import Comparison, compare_groups
from prismlm.instruments.heads.head_use import LEAST_VISIBLE, HeadUses, head_uses
from prismlm.instruments.heads.length import (
    DOCUMENTS,
    LossAgainstLength,
    long_documents,
    loss_against_length,
)
from prismlm.instruments.heads.rates import DISTORTION, LayerRates, layer_rates
from prismlm.instruments.heads.resonance import ORDER, RatioTerms, cross_terms
from prismlm.instruments.heads.states import POSITIONS, read_states, signal_noise_layers
from prismlm.models.positions import check_window
from prismlm.outputs import write_csv
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class HeadReport:
    """The heads of one model over a text.

    Attributes:
        model: its name.
        corpus: what was read.
        uses: what each head does.
        comparison: signal against noise heads, or None in a model whose heads are of one kind.
    """

    model: str
    corpus: CorpusPart
    uses: HeadUses
    comparison: tuple[Comparison, ...] | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not a number is None."""
        return finite(asdict(self))


def head_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    layers: Sequence[int] | None = None,
    least_visible: int = LEAST_VISIBLE,
    progress: Reporter = SILENT,
) -> HeadReport:
    """Return what each head does over a text, and how signal and noise heads differ.

    Raises:
        InputError: as :func:`head_uses`, or a split without documents.
    """
    check_window(model, sequences.length)
    documents_of(sequences.corpus, sequences.split)
    if sequences.length < least_visible:
        raise InputError(
            f"windows of {sequences.length} tokens, of which no token sees {least_visible} tokens: "
            "read longer windows, or count queries that see fewer."
        )
    uses = head_uses(
        model, sequences.batches(), layers=layers, least_visible=least_visible, progress=progress
    )
    mixed = {head.group for head in uses.heads} == {"signal", "noise"}
    comparison = compare_groups(uses) if mixed else None
    return HeadReport(name, sequences.part(uses.tokens), uses, comparison)


def write_heads(reports: Sequence[HeadReport], path: str | os.PathLike[str]) -> None:
    """Write one CSV row a head: model, layer, head, group, its figures and its spectrum.

    Columns of the spectrum are named by the distances of their bin, as ``share_3_4``. The row of
    uniform attention has the group "uniform" and no layer.
    """
    bins = max((report.uses.bins for report in reports), key=len)
    names = [f"share_{low}" if low == high else f"share_{low}_{high}" for low, high in bins]
    figures = [key for key in asdict(reports[0].uses.uniform) if key != "spectrum"]
    rows: list[dict[str, Any]] = []
    for report in reports:
        uniform = asdict(report.uses.uniform) | {"group": "uniform"}
        for row in (uniform, *map(asdict, report.uses.heads)):
            shares = dict(zip(names, row.pop("spectrum"), strict=False))
            rows.append({"model": report.model, **row, **shares})
    write_csv(path, ["model", "layer", "head", "group", *figures, *names], rows)


class SpectraOptions(NamedTuple):
    """How rates, cross terms and the loss by length are read.

    Attributes:
        positions: N, of rates and of the content in cross terms.
        distortion: ε.
        order: of the small denominators.
        context: tokens of a window of the loss by length; None for twice the trained length, or
            twice the length of the sequences where that is not known.
        trained_length: tokens of a training row, if known.
        documents: of the loss by length.
        seed: of positions, documents, permutations and random dictionaries.
    """

    positions: int = POSITIONS
    distortion: float = DISTORTION
    order: int = ORDER
    context: int | None = None
    trained_length: int | None = None
    documents: int = DOCUMENTS
    seed: int = 0


DEFAULTS = SpectraOptions()


@dataclass(frozen=True)
class SpectraReport:
    """Coding rates, cross terms and loss by length of one model over a text.

    Attributes:
        model: its name.
        corpus: what was read.
        options: how.
        rates: of each layer; empty without signal/noise heads.
        cross_terms: of the model's own rotations and of others; empty likewise.
        loss: by length of context, or None.
        no_loss: why there is none, or None.
    """

    model: str
    corpus: CorpusPart
    options: SpectraOptions
    rates: tuple[LayerRates, ...]
    cross_terms: tuple[RatioTerms, ...]
    loss: LossAgainstLength | None
    no_loss: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; what is not a number is None."""
        value = {
            "options": self.options._asdict(),
            "rates": [rates.to_dict() for rates in self.rates],
            "cross_terms": [terms.to_dict() for terms in self.cross_terms],
        }
        return finite(asdict(self) | value)


def spectra_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    options: SpectraOptions = DEFAULTS,
    loss_only: bool = False,
    progress: Reporter = SILENT,
) -> SpectraReport:
    """Return rates, cross terms and the loss by length of context over a text.

    The loss by length has a reason in its place where no document of the split is long enough,
    unless the length, or the loss alone, was asked for.

    Args:
        model: a decoder of signal/noise attention; any decoder with ``loss_only``.
        sequences: the text of rates and content; of the loss, its corpus and split.
        name: of the model, for the report.
        options: how to read.
        loss_only: leave out rates and cross terms.
        progress: shows the reading.

    Raises:
        InputError: as :func:`read_states`, :func:`layer_rates`, :func:`cross_terms` and
            :func:`loss_against_length`, or a seed below 0.
    """
    rates: tuple[LayerRates, ...] = ()
    terms: tuple[RatioTerms, ...] = ()
    positions = 0
    shared: dict[str, Any] = {"seed": options.seed, "progress": progress}
    # Said before minutes of reading, not after.
    _check(options)
    if not loss_only:
        signal_noise_layers(model)
        documents_of(sequences.corpus, sequences.split)
        states = read_states(model, sequences.batches(), positions=options.positions, **shared)
        positions = len(states[0].positions)
        rates = layer_rates(states, distortion=options.distortion, seed=options.seed)
        trained = options.trained_length or sequences.length
        terms = cross_terms(states, length=trained, order=options.order)
    length = options.context or 2 * (options.trained_length or sequences.length)
    # Asked for by itself, it has to be said at once.
    wanted = loss_only or options.context is not None
    no_loss = None if wanted else _too_long(model, sequences, length)
    loss = None
    if no_loss is None:
        loss = loss_against_length(
            model,
            sequences.corpus,
            length=length,
            trained_length=options.trained_length,
            split=sequences.split,
            documents=options.documents,
            **shared,
        )
    return SpectraReport(name, sequences.part(positions), options, rates, terms, loss, no_loss)


def _check(options: SpectraOptions) -> None:
    check_number("the distortion ε", options.distortion, "a positive number", lambda x: x > 0)
    check_whole("the order of denominators", options.order, 1)
    check_whole("the seed", options.seed)
    if options.context is not None:
        check_whole("the number of tokens of a window", options.context, 2)
    check_whole("the number of documents of the loss", options.documents, 1)


def _too_long(model: PreTrainedModel, sequences: Sequences, length: int) -> str | None:
    """Return why no loss can be read in windows of so many tokens, or None."""
    try:
        check_window(model, length)
        long_documents(sequences.corpus, sequences.split, length)
    except InputError as error:
        return str(error)
    return None
