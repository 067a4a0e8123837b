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
from prismlm.errors import (
    InputError,
    NotFiniteError,
    check_finite,
    check_number,
    check_whole,
)
from prismlm.models.evaluating import evaluating
from prismlm.models.positions import check_window
from prismlm.models.seam import LogitMap, capture, output_embedding
from prismlm.probes.heads.resonance import ORDER, cross_terms
from prismlm.probes.heads.states import (
    DISTORTION,
    POSITIONS,
    layer_rates,
    read_states,
    signal_noise_layers,
)
from prismlm.probes.reading import documents_of, target_losses
from prismlm.probes.results import Report, Row, Table
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
    predicted with L/2 to L − 1 tokens of context, as a control. ``documents`` are drawn from the
    seed; all there are if that is fewer.

    Returns:
        A row for each length of context, from ``low`` to ``high`` tokens, all of the same
        documents: ``loss``, mean over documents of the mean cross-entropy, nats a token, and its
        standard ``error`` over documents, NaN of one; ``short_loss``, of the control; the
        ``difference`` from it, above 0 where text further back than the trained length hurts, and
        ``difference_error``, paired by document.
    """
    check_window(model, length)
    drawn = np.random.default_rng(seed).permutation(documents_of(corpus, split, length))
    starts = corpus.starts[drawn[:documents]].tolist()
    windows = torch.from_numpy(
        np.stack([corpus.read_tokens(start, length) for start in starts]).astype(np.int64)
    )
    full: list[Tensor] = []
    short: list[Tensor] = []
    with evaluating(model), progress.task("Reading lengths", windows.numel()) as task:
        for ids in windows.split(max(1, PASS_TOKENS // length)):
            full.append(token_losses(model, ids))
            if trained_length is not None and trained_length < length:
                short.append(_short_losses(model, ids, trained_length, corpus.prefix))
            task.advance(ids.numel())
    own, control = torch.cat(full), torch.cat(short) if short else None
    rows: list[Row] = []
    for low, end in pairwise(context_edges(length, trained_length)):
        # A token's context is its place from 1 on.
        bucket = slice(low - 1, end - 1)
        loss = own[:, bucket].mean(1)
        row: Row = {"context": str(low) if low == end - 1 else f"{low}–{end - 1}", "low": low}
        row |= {"high": end - 1, "loss": loss.mean().item(), "error": _error(loss)}
        row |= dict.fromkeys(("short_loss", "difference", "difference_error"))
        # Up to the trained length both read the same.
        if control is not None and trained_length is not None and low >= trained_length:
            other = control[:, bucket].mean(1)
            row["short_loss"] = other.mean().item()
            row["difference"] = (loss - other).mean().item()
            row["difference_error"] = _error(loss - other)
        rows.append(row)
    columns = {"context": "", "loss": ".3f", "error": ".3f", "short_loss": ".3f",
               "difference": "+.3f", "difference_error": ".3f"}  # fmt: skip
    facts = {"length": length, "trained_length": trained_length, "documents": len(windows)}
    return Table("Loss by length of context, nats a token", columns, tuple(rows), facts)


@torch.no_grad()
def token_losses(
    model: PreTrainedModel, input_ids: Int64[Tensor, "B T"]
) -> Float[Tensor, "B T_less_1"]:
    """Return the cross-entropy of each token but a row's first, nats; float64, on the CPU."""
    ids = input_ids.to(model.device)
    with capture(model, logits=False) as seen:
        model(input_ids=ids, use_cache=False)
    embedding, logit_map = output_embedding(model), LogitMap.of(model)
    states, targets = seen.z[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = zip(states.split(LOGIT_ROWS), targets.split(LOGIT_ROWS), strict=True)
    losses = torch.cat([target_losses(logit_map(embedding(z)), own) for z, own in parts])
    check_finite("losses", losses)
    return losses.view(len(ids), -1)


def context_edges(length: int, trained_length: int | None = None) -> tuple[int, ...]:
    """Return where buckets of context start, ascending, and T, where the last ends.

    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, …: each doubling, from 16 on in halves; and the trained
    length, so that no bucket lies on both sides of it.
    """
    edges = {1, length, trained_length or 1} | {2**k for k in range(1, length.bit_length())}
    edges |= {3 * 2**k for k in range(3, length.bit_length())}
    return tuple(sorted(edge for edge in edges if edge <= length))


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

    def check(self) -> None:
        """Refuse options before minutes of reading."""
        check_number("the distortion ε", self.distortion, "a positive number", lambda x: x > 0)
        check_whole("the order of denominators", self.order, 1)
        check_whole("the seed", self.seed)
        check_whole("the number of documents of the loss", self.documents, 1)
        if self.trained_length is not None:
            check_whole("the trained length", self.trained_length, 1)
        if self.context is not None:
            check_whole("the number of tokens of a window", self.context, 2)


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

    The tables are ``rates``, ``cross_terms`` and ``loss``; the last is left out where no document
    of the split is long enough, unless its length, or it alone, was asked for. With ``loss_only``
    the model may be any decoder, else one of signal/noise attention.
    """
    options.check()
    tables: dict[str, Table] = {}
    left_out: dict[str, str] = {}
    positions, trained = 0, options.trained_length or sequences.length
    if not loss_only:
        signal_noise_layers(model)
        drawn = {"positions": options.positions, "seed": options.seed, "progress": progress}
        states = read_states(model, sequences.batches(), **drawn)
        positions = len(states[0].positions)
        rates = layer_rates(states, distortion=options.distortion, seed=options.seed)
        tables = {"rates": rates}
        tables["cross_terms"] = cross_terms(states, length=trained, order=options.order)
    try:
        tables["loss"] = loss_against_length(
            model,
            sequences.corpus,
            length=2 * trained if options.context is None else options.context,
            trained_length=options.trained_length,
            split=sequences.split,
            documents=options.documents,
            seed=options.seed,
            progress=progress,
        )
    except NotFiniteError:
        raise
    except InputError as error:
        if loss_only or options.context is not None:
            raise
        left_out["loss"] = str(error)
    facts = {"corpus": asdict(sequences.part(positions)), "options": options._asdict()}
    return Report(name, facts, tables, left_out)
