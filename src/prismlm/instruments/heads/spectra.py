"""Loss against the length of the context; with coding rates and cross terms, a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from prismlm.corpus.sequences import Sequences
from prismlm.errors import InputError, check_finite, check_number, check_whole
from prismlm.instruments.forward import documents_of, target_losses
from prismlm.instruments.heads.resonance import ORDER, cross_terms
from prismlm.instruments.heads.states import (
    DISTORTION,
    POSITIONS,
    layer_rates,
    read_states,
    signal_noise_layers,
)
from prismlm.instruments.results import Report, Row, Table
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import check_window
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.progress import SILENT, Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prismlm.corpus.store import Corpus, Split

DOCUMENTS = 32
# Positions of a forward pass, and of the logits that are held at once.
PASS_TOKENS = 4096
LOGIT_ROWS = 1024


def loss_against_length(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    length: int,
    trained_length: int | None = None,
    split: Split = "heldout",
    documents: int = DOCUMENTS,
    seed: int = 0,
    progress: Reporter = SILENT,
) -> Table:
    """Return the loss by length of context, of documents that are at least ``length`` long.

    Later parts of a document may be easier or harder in themselves. So with a trained length L,
    the same tokens beyond it are read again in windows of L that start every L/2 tokens, each
    predicted with L/2 to L − 1 tokens of context: the control that the difference is against.

    Args:
        model: any causal language model.
        corpus: the text.
        length: tokens of a window; at least 2.
        trained_length: L; None if it is not known, or to leave the control out.
        split: which documents.
        documents: how many, drawn from the seed; all there are if that is fewer.
        seed: of the draw.
        progress: shows the reading.

    Returns:
        A row for each length of context, from ``low`` to ``high`` tokens, all of the same
        documents: ``loss``, mean over documents of the mean cross-entropy, nats a token, and its
        standard ``error`` over documents, NaN of one; ``short_loss`` of the same tokens, read in
        windows of the trained length only; the ``difference`` from it, above 0 where what lies
        further back than the trained length hurts, and ``difference_error``, paired by document.

    Raises:
        InputError: a window that the model has no positions for, or that no document fills, a
            trained length below 2, a number of documents below 1, a seed below 0, or losses that
            are not finite.
    """
    check_whole("the number of tokens of a window", length, 2)
    check_whole("the number of documents of the loss", documents, 1)
    check_whole("the seed", seed)
    if trained_length is not None:
        check_whole("the trained length", trained_length, 2)
    check_window(model, length)
    drawn = np.random.default_rng(seed).permutation(long_documents(corpus, split, length))
    starts = corpus.starts[drawn[:documents]].tolist()
    edges = context_edges(length, trained_length)
    windows = np.stack([corpus.read_tokens(start, length) for start in starts]).astype(np.int64)
    control = None if trained_length is None or trained_length >= length else trained_length
    full, short = _window_losses(model, torch.from_numpy(windows), control, corpus.prefix, progress)
    beside = None if short is None else _means(short, edges)
    return Table(
        "Loss by length of context, nats a token",
        {"context": "", "loss": ".3f", "error": ".3f", "short_loss": ".3f", "difference": "+.3f",
         "difference_error": ".3f"},
        _buckets(_means(full, edges), beside, edges, trained_length),
        {"length": length, "trained_length": trained_length, "documents": len(windows)},
    )  # fmt: skip


def _window_losses(
    model: PreTrainedModel,
    windows: Int64[Tensor, "N T"],
    control: int | None,
    prefix: Sequence[int],
    progress: Reporter,
) -> tuple[Float[Tensor, "N T_less_1"], Float[Tensor, "N T_less_1"] | None]:
    """Return the losses of windows, and those beyond ``control`` tokens read in windows of that."""
    full: list[Tensor] = []
    short: list[Tensor] = []
    with evaluating(model), progress.task("Reading lengths", windows.numel()) as task:
        for ids in windows.split(max(1, PASS_TOKENS // windows.shape[1])):
            full.append(token_losses(model, ids))
            if control is not None:
                short.append(_short_losses(model, ids, control, prefix))
            task.advance(ids.numel())
    return torch.cat(full), torch.cat(short) if short else None


@torch.no_grad()
def token_losses(
    model: PreTrainedModel, input_ids: Int64[Tensor, "B T"]
) -> Float[Tensor, "B T_less_1"]:
    """Return the cross-entropy of each token but a row's first, nats; float64, on the CPU.

    Raises:
        InputError: a loss that is not finite.
    """
    ids = input_ids.to(model.device)
    with capture(model, logits=False) as seen:
        model(input_ids=ids, use_cache=False)
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    states, targets = seen.z[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts: list[Tensor] = []
    for z, target in zip(states.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True):
        parts.append(target_losses(logit_map(embedding(z)), target))
    losses = torch.cat(parts).view(len(ids), -1)
    check_finite("losses", losses)
    return losses


def context_edges(length: int, trained_length: int | None = None) -> tuple[int, ...]:
    """Return where buckets of context start, ascending, and T, where the last ends.

    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, …: each doubling, from 16 on in halves; and the trained
    length, so that no bucket lies on both sides of it.
    """
    edges, start = {1, length}, 2
    while start < length:
        edges.add(start)
        if start >= 16:
            edges.add(min(start * 3 // 2, length))
        start *= 2
    if trained_length is not None and trained_length < length:
        edges.add(trained_length)
    return tuple(sorted(edges))


def long_documents(corpus: Corpus, split: Split, length: int) -> np.ndarray:
    """Return the numbers of a split's documents of at least ``length`` tokens, ascending.

    Raises:
        InputError: there are none, or the split is empty or unknown.
    """
    numbers = documents_of(corpus, split)
    lengths = corpus.lengths[numbers]
    if not (lengths >= length).any():
        raise InputError(
            f"no document of {corpus.name!r}, {split}, has {length:,} tokens: the longest has "
            f"{int(lengths.max()):,}. Take a shorter window, or a corpus of longer documents."
        )
    return numbers[lengths >= length]


def _short_losses(
    model: PreTrainedModel, ids: Tensor, trained: int, prefix: Sequence[int] = ()
) -> Tensor:
    """Return each token's loss with less than ``trained`` tokens of context, at least half."""
    length, stride = ids.shape[1], max(1, trained // 2)
    losses = torch.empty(len(ids), length - 1, dtype=torch.float64)
    known, start = 0, 0
    while known < length - 1:
        window = ids[:, start : start + trained].clone()
        window[:, : len(prefix)] = torch.tensor(prefix, dtype=ids.dtype)
        found = token_losses(model, window)
        # Token t of the document is the loss at t − 1; this window's first is start + 1.
        end = start + found.shape[1]
        losses[:, known:end] = found[:, known - start :]
        known, start = end, start + stride
    return losses


def _means(losses: Float[Tensor, "D C"], edges: Sequence[int]) -> Float[Tensor, "D buckets"]:
    """Return each document's mean by bucket; a token's context is its place from 1 on."""
    columns = [losses[:, low - 1 : high - 1].mean(1) for low, high in pairwise(edges)]
    return torch.stack(columns, 1)


def _buckets(
    found: Tensor, beside: Tensor | None, edges: Sequence[int], trained: int | None
) -> tuple[Row, ...]:
    rows: list[Row] = []
    for i, (low, end) in enumerate(pairwise(edges)):
        own = found[:, i]
        row: Row = {
            "context": str(low) if low == end - 1 else f"{low}–{end - 1}",
            "low": low,
            "high": end - 1,
            "loss": own.mean().item(),
            "error": _error(own),
            "short_loss": None,
            "difference": None,
            "difference_error": None,
        }
        # Up to the trained length both read the same.
        if beside is not None and trained is not None and low >= trained:
            apart = own - beside[:, i]
            row["short_loss"] = beside[:, i].mean().item()
            row["difference"], row["difference_error"] = apart.mean().item(), _error(apart)
        rows.append(row)
    return tuple(rows)


def _error(values: Tensor) -> float:
    return values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan


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


def spectra_report(
    model: PreTrainedModel,
    sequences: Sequences,
    *,
    name: str = "",
    options: SpectraOptions = DEFAULTS,
    loss_only: bool = False,
    progress: Reporter = SILENT,
) -> Report:
    """Return rates, cross terms and the loss by length of context over a text.

    The tables are ``rates``, ``cross_terms`` and ``loss``; that is left out where no document of
    the split is long enough, unless the length, or the loss alone, was asked for.

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
    tables: dict[str, Table] = {}
    positions = 0
    shared: Row = {"seed": options.seed, "progress": progress}
    # Said before minutes of reading, not after.
    _check(options)
    if not loss_only:
        signal_noise_layers(model)
        documents_of(sequences.corpus, sequences.split)
        states = read_states(model, sequences.batches(), positions=options.positions, **shared)
        positions = len(states[0].positions)
        trained = options.trained_length or sequences.length
        tables["rates"] = layer_rates(states, distortion=options.distortion, seed=options.seed)
        tables["cross_terms"] = cross_terms(states, length=trained, order=options.order)
    facts = {"corpus": asdict(sequences.part(positions)), "options": options._asdict()}
    length = options.context or 2 * (options.trained_length or sequences.length)
    # Asked for by itself, it has to be said at once.
    asked = loss_only or options.context is not None
    no_loss = None if asked else _too_long(model, sequences, length)
    if no_loss is not None:
        return Report(name, facts, tables, {"loss": no_loss})
    tables["loss"] = loss_against_length(
        model,
        sequences.corpus,
        length=length,
        trained_length=options.trained_length,
        split=sequences.split,
        documents=options.documents,
        **shared,
    )
    return Report(name, facts, tables)


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
