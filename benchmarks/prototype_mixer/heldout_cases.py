"""Cases taken from a corpus: places where a concept's word comes again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.models.seam import run_decoder
from prismlm.probes.channels.effects import Probe, probabilities_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.windows import WindowBatch

CONTEXT_KEPT = 24


@torch.no_grad()
def heldout_cases(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    concepts: Mapping[str, Sequence[int]],
    sequences: Sequences,
    *,
    minimum_probability: float = 0.01,
    per_document: int = 1,
    most: int = 200,
) -> dict[str, tuple[Probe, ...]]:
    """Return places of a corpus where one of a concept's tokens comes next, by concept.

    A place counts if one of the tokens also stands before it, two positions or more before the one
    that comes next, so that a channel can hold it when the last position of the context reads; and
    if the model gives the token that comes next at least ``minimum_probability``. Of a document
    the first places count. Nothing is known of any intervention here.

    Args:
        model: with prototype mixers, in evaluation mode.
        tokenizer: of the model.
        concepts: tokens by name.
        sequences: the text: use another split than the channels were found in.
        minimum_probability: of the token that comes next.
        per_document: places of one document at most; 1 keeps cases independent.
        most: places of one concept at most.

    Raises:
        InputError: nothing is wanted, a token that the model does not have, or no text.
    """
    _check(model, concepts, minimum_probability, per_document, most)
    members = {}
    for name, tokens in concepts.items():
        members[name] = torch.zeros(model.config.vocab_size, dtype=torch.bool)
        members[name][list(tokens)] = True
    found: dict[str, list[tuple[int, Probe]]] = {name: [] for name in concepts}
    for batch in sequences.batches():
        rows = {name: _again(batch, flags) for name, flags in members.items()}
        if not any(bool(hits.any()) for hits in rows.values()):
            continue
        hidden = run_decoder(model, batch.input_ids, batch.attention_mask).last_hidden_state
        for name, hits in rows.items():
            documents = {probe.document for _, probe in found[name]}
            if len(documents) < most:
                found[name] += _probes(
                    model, tokenizer, name, batch, hits, hidden, minimum_probability
                )
    return {name: _spread(probes, per_document, most) for name, probes in found.items()}


def _again(batch: WindowBatch, members: Tensor) -> Tensor:
    """Return which tokens belong to the concept and have one of it two or more positions before."""
    hits = members[batch.input_ids] & batch.owned
    before = torch.zeros_like(hits)
    before[:, 2:] = hits[:, :-2].cumsum(1) > 0
    return hits & before


def _probes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    batch: WindowBatch,
    hits: Tensor,
    hidden: Tensor,
    minimum: float,
) -> list[tuple[int, Probe]]:
    row, place = hits.nonzero(as_tuple=True)
    targets = batch.input_ids[row, place]
    at = hidden[row.to(hidden.device), (place - 1).to(hidden.device)]
    if not len(row):
        return []
    likely = probabilities_at(model, at, targets.to(hidden.device)).cpu() >= minimum
    found: list[tuple[int, Probe]] = []
    columns = (column[likely].tolist() for column in (row, place, targets))
    for r, p, target in zip(*columns, strict=True):
        ids: list[int] = batch.input_ids[r, :p].tolist()
        context = str(tokenizer.decode(ids[-CONTEXT_KEPT:], clean_up_tokenization_spaces=False))
        word = str(tokenizer.decode([target], clean_up_tokenization_spaces=False)).strip()
        probe = Probe(name, context, word, tuple(ids), target, int(batch.document[r]))
        found.append((int(batch.positions[r, p]), probe))
    return found


def _spread(found: list[tuple[int, Probe]], per_document: int, most: int) -> tuple[Probe, ...]:
    """Return the first places of each document, documents in the order in which they were read."""
    places: dict[int | None, list[tuple[int, Probe]]] = {}
    for position, probe in found:
        places.setdefault(probe.document, []).append((position, probe))
    kept = [
        probe
        for group in places.values()
        for _, probe in sorted(group, key=lambda pair: pair[0])[:per_document]
    ]
    return tuple(kept[:most])


def _check(
    model: PreTrainedModel,
    concepts: Mapping[str, Sequence[int]],
    minimum: float,
    per_document: int,
    most: int,
) -> None:
    if not concepts or min(per_document, most) < 1 or not 0 < minimum < 1:
        raise InputError(
            f"{len(concepts)} concepts, {most} cases of each with {per_document} of a document and "
            f"a probability of {minimum:g}: expected at least 1 each and between 0 and 1."
        )
    for name, tokens in concepts.items():
        if not tokens or not all(0 <= t < model.config.vocab_size for t in tokens):
            raise InputError(
                f"the concept {name!r} has {len(tokens)} tokens: expected at least one, and of the "
                f"model's {model.config.vocab_size}."
            )
    if model.training:
        raise InputError("the model is in training mode: call model.eval() before measuring it.")
