"""Concepts of channels: the words that write into each most, and where text repeats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prismlm.corpus.windows import Sequences
from prismlm.errors import InputError
from prismlm.lens.labels.contexts import Vocabulary
from prismlm.models.seam import run_decoder
from prismlm.probes.channels.activations import Activations
from prismlm.probes.channels.concepts import whole_words
from prismlm.probes.channels.effects import Probe, probabilities_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from prismlm.corpus.windows import WindowBatch

MAX_CASES = 200
CONTEXT_TOKENS = 24


@dataclass(frozen=True, eq=False)
class TokenGates:
    """Write gates summed by token, float64.

    Attributes:
        count: occurrences of each token [V].
        sums: Σ write over the positions of each token, for each layer [V, R].
        deviations: of each channel's write gate over positions, for each layer [R].
    """

    count: Tensor
    sums: tuple[Tensor, ...]
    deviations: tuple[Tensor, ...]

    @classmethod
    def from_activations(cls, read: Activations, vocabulary: int) -> TokenGates:
        """Sum the write gates of all positions."""
        gates = [gate.double() for gate in read.values.values()]
        return cls(
            read.tokens.bincount(minlength=vocabulary),
            tuple(w.new_zeros(vocabulary, w.shape[1]).index_add_(0, read.tokens, w) for w in gates),
            tuple(write.std(0, correction=0) for write in gates),
        )

    def mean(self, layer: int) -> Tensor:
        """Return each channel's mean write gate [R]."""
        return self.sums[layer].sum(0) / self.count.sum()

    def difference(self, layer: int, tokens: list[int]) -> Tensor:
        """Return Cohen's d of each channel at the occurrences of some tokens [R]."""
        deviation = self.deviations[layer]
        shift = self.sums[layer][tokens].sum(0) / self.count[tokens].sum() - self.mean(layer)
        return torch.where(deviation > 1e-12, shift / deviation.clamp(min=1e-12), 0.0)


@dataclass(frozen=True)
class ConceptToken:
    """A token that writes into a channel; ``ratio`` is its mean gate over the channel's."""

    token_id: int
    text: str
    count: int
    gate: float
    ratio: float


@dataclass(frozen=True)
class Concept:
    """A channel and the whole words that write into it most.

    ``difference`` is Cohen's d of the channel at all their occurrences.
    """

    layer: int
    channel: int
    tokens: tuple[ConceptToken, ...]
    difference: float

    @property
    def words(self) -> tuple[str, ...]:
        """The words, without the space before them."""
        return tuple(token.text.strip() for token in self.tokens)

    @property
    def name(self) -> str:
        """The words, joined."""
        return ", ".join(self.words)


def top_tokens(
    gates: TokenGates, texts: Sequence[str], place: tuple[int, int], eligible: Tensor, count: int
) -> tuple[ConceptToken, ...]:
    """Return the eligible tokens [V] with the largest mean gate in a layer's channel."""
    layer, channel = place
    mean = float(gates.mean(layer)[channel])
    gate = gates.sums[layer][:, channel] / gates.count.clamp(min=1)
    order = torch.where(eligible, gate, -1.0).argsort(descending=True, stable=True)
    return tuple(
        ConceptToken(i, texts[int(i)], int(gates.count[i]), float(gate[i]), float(gate[i]) / mean)
        for i in order[: min(count, int(eligible.sum()))].tolist()
    )


def propose_concepts(
    gates: TokenGates,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    words: int,
    least: int = 100,
    common: int = 100,
) -> tuple[Concept, ...]:
    """Return the channels whose most written words stand out most, with these words.

    Words are whole-word tokens of three letters or more that occur ``least`` times, without the
    ``common`` most frequent tokens. Channels rank by d; a channel that shares a word with an
    earlier one is left out.

    Raises:
        InputError: fewer than ``words`` words are frequent enough.
    """
    known = whole_words(tokenizer)[: len(gates.count)]
    eligible = torch.zeros(len(gates.count), dtype=torch.bool)
    eligible[: len(known)] = known
    eligible[gates.count.argsort(descending=True, stable=True)[:common]] = False
    eligible &= gates.count >= least
    if int(eligible.sum()) < words:
        raise InputError(
            f"{int(eligible.sum())} words occur {least} times or more in "
            f"{int(gates.count.sum()):,} tokens: expected {words}. Read more text, or rarer words."
        )
    texts = Vocabulary(tokenizer, len(tokenizer)).texts
    concepts: list[Concept] = []
    for layer, sums in enumerate(gates.sums):
        for channel in range(sums.shape[1]):
            tokens = top_tokens(gates, texts, (layer, channel), eligible, words)
            pooled = gates.difference(layer, [token.token_id for token in tokens])
            concepts.append(Concept(layer, channel, tokens, float(pooled[channel])))
    concepts.sort(key=lambda c: (-c.difference, c.layer, c.channel))
    taken: set[str] = set()
    chosen: list[Concept] = []
    for concept in concepts:
        if len(chosen) < count and not taken & set(concept.words):
            chosen.append(concept)
            taken |= set(concept.words)
    return tuple(chosen)


@torch.no_grad()
def heldout_cases(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    concepts: Mapping[str, Sequence[int]],
    sequences: Sequences,
    *,
    minimum_probability: float = 0.01,
) -> dict[str, tuple[Probe, ...]]:
    """Return for each concept where one of its tokens comes next, at most one case per document.

    One of the tokens must also occur two or more positions before the predicted one, so that a
    channel can hold it when the last position of the context reads, and the model must give the
    predicted token ``minimum_probability``. No intervention is looked at.
    """
    members = {name: torch.zeros(model.config.vocab_size, dtype=torch.bool) for name in concepts}
    for name, tokens in concepts.items():
        members[name][list(tokens)] = True
    # By concept and document: the position of the first case, and the case.
    first: dict[str, dict[int, tuple[int, Probe]]] = {name: {} for name in concepts}
    for batch in sequences.batches():
        hits = {name: _repeated(batch, flags) for name, flags in members.items()}
        wanted = [n for n, found in hits.items() if found.any() and len(first[n]) < MAX_CASES]
        if not wanted:
            continue
        hidden = run_decoder(model, batch.input_ids, batch.attention_mask).last_hidden_state
        for name in wanted:
            for position, probe in _probes(
                model, tokenizer, name, batch, hits[name], hidden, minimum_probability
            ):
                assert probe.document is not None
                before = first[name].get(probe.document)
                if before is None or position < before[0]:
                    first[name][probe.document] = position, probe
    return {
        name: tuple(probe for _, probe in cases.values())[:MAX_CASES]
        for name, cases in first.items()
    }


def _repeated(batch: WindowBatch, members: Tensor) -> Tensor:
    """Return which tokens are members that have a member two or more positions before them."""
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
    row, column = hits.nonzero(as_tuple=True)
    targets = batch.input_ids[row, column]
    states = hidden[row.to(hidden.device), (column - 1).to(hidden.device)]
    likely = probabilities_at(model, states, targets.to(hidden.device)).cpu() >= minimum
    cases: list[tuple[int, Probe]] = []
    kept = (values[likely].tolist() for values in (row, column, targets))
    for r, end, target in zip(*kept, strict=True):
        ids: list[int] = batch.input_ids[r, :end].tolist()
        context, word = (
            str(tokenizer.decode(part, clean_up_tokenization_spaces=False))
            for part in (ids[-CONTEXT_TOKENS:], [target])
        )
        probe = Probe(name, context, word.strip(), tuple(ids), target, int(batch.document[r]))
        cases.append((int(batch.positions[r, end]), probe))
    return cases
