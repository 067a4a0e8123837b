"""What a prediction is made of, as values: one step after every token read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.pieces import Piece, decode_token, pieces_of
from prismlm.explain.chain import ChainsOfText, PrototypeChain
from prismlm.explain.prediction import Predictions
from prismlm.lens.lens import Lens

PROTOTYPES_CHAINED = 3
TargetFrom = Literal["text", "generated", "argmax"]


class PrototypeUse(NamedTuple):
    """One prototype's part in one prediction.

    Attributes:
        id: its number.
        activation: α > 0.
        cosine: to the hidden state.
        contribution: scale · α (W p)[target], in logits.
        evidence: contribution minus its mean over the vocabulary.
        name: from the lens, or None without one.
        category: likewise.
    """

    id: int
    activation: float
    cosine: float
    contribution: float
    evidence: float
    name: str | None = None
    category: str | None = None


@dataclass(frozen=True)
class Step:
    """The prediction made after reading one token.

    Attributes:
        position: of the token read, from 0.
        token, token_id: the token read; U+FFFD where it holds only some bytes of a character.
        target, target_id: the token whose logit is split; likewise.
        target_from: the next token of the text, a generated token, or the model's top token.
        logit: the sum of contributions, residual and bias.
        model_logit: the model's own, before any soft-cap; the two agree to 1e-3·max(1, |logit|).
        probability: the model's, of the target.
        bias, residual: their parts of the logit.
        residual_evidence, bias_evidence: these parts minus their means over the vocabulary.
        explained_share: Σ e_i / (Σ e_i + e_residual + e_bias) for the target.
        prototypes: those in use, by contribution, largest first.
        uncertainty: what was fed back to this position, the entropy of the prediction before it as
            a share of the largest possible, for models with uncertainty feedback; None at the
            first token.
        uncertainty_code: the code that was fed back, from 0 to one less than the model's levels.
        pieces: token and target as readers are shown them, with whole characters.
        read_chains: gives ``chains``; None for models without prototype mixers.
    """

    position: int
    token: str
    token_id: int
    target: str
    target_id: int
    target_from: TargetFrom
    logit: float
    model_logit: float
    probability: float
    bias: float
    residual: float
    residual_evidence: float
    bias_evidence: float
    explained_share: float
    prototypes: tuple[PrototypeUse, ...]
    uncertainty: float | None = None
    # The same in the model's own unit, which the levels give: in no table and no JSON.
    uncertainty_code: int | None = field(default=None, compare=False, repr=False)
    pieces: tuple[Piece, Piece] = field(default=(Piece(""), Piece("")), compare=False, repr=False)
    read_chains: Callable[[], tuple[PrototypeChain, ...]] | None = field(
        default=None, compare=False, repr=False
    )

    @cached_property
    def chains(self) -> tuple[PrototypeChain, ...] | None:
        """Which channels and earlier tokens the leading prototypes' activations came through.

        They are computed when they are first looked at; None for models without prototype mixers.
        """
        return None if self.read_chains is None else self.read_chains()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"chains": self.chains, "read_chains": None}

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of ``prismlm explain --json``; chains only where there are any."""
        value = self._figures() | {"prototypes": [use._asdict() for use in self.prototypes]}
        if self.chains is not None:
            value["chains"] = [chain.to_dict() for chain in self.chains]
        return value

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row of a table for each prototype in use, the step's own figures repeated."""
        own = {name: value for name, value in self._figures().items() if name != "prototypes"}
        for use in self.prototypes:
            yield own | {f"prototype_{k}": v for k, v in use._asdict().items()}

    def _figures(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.compare}


def steps_of(
    split: Predictions,
    ids: list[int],
    prompt_length: int,
    tokenizer: PreTrainedTokenizerBase,
    lens: Lens | None,
    chains: ChainsOfText | None = None,
    pieces: list[Piece] | None = None,
) -> tuple[Step, ...]:
    """Return the steps of one text; each token is decoded once.

    With ``pieces``, of all ids and the target beyond, they are the last steps of the text: as many
    as are split.
    """
    parts, scores, uses = split.parts, split.scores, list(_uses(split, lens))
    # Whole columns at once: reading single elements of tensors takes longer than the mathematics.
    columns = (
        *(parts.logit, scores.logits, scores.log_probabilities.exp(), parts.bias),
        *(parts.residual, parts.residual_evidence, parts.bias_evidence, parts.explained_share),
    )
    figures = zip(*(column.tolist() for column in columns), uses, strict=True)
    decode = cache(lambda token: decode_token(tokenizer, token))
    targets = split.targets.tolist()
    first = 0 if pieces is None else len(pieces) - 1 - len(targets)
    # Beyond the text there is a target at most.
    read = pieces or pieces_of(tokenizer, ids + targets[len(ids) - 1 :])
    labels = [piece.label for piece in read]
    fed_back = split.fed_back or [(None, None)] * len(uses)

    def target_from(position: int) -> TargetFrom:
        if position + 1 >= len(ids):
            return "argmax"
        return "text" if position + 1 < prompt_length else "generated"

    return tuple(
        Step(
            position,
            decode(ids[position]),
            ids[position],
            decode(targets[t]),
            targets[t],
            target_from(position),
            *row,
            uncertainty=fed_back[t][0],
            uncertainty_code=fed_back[t][1],
            pieces=(read[position], read[position + 1]),
            read_chains=chains and partial(chains.of, t, uses[t][:PROTOTYPES_CHAINED], labels),
        )
        for t, (position, row) in enumerate(enumerate(figures, first))
    )


def _uses(split: Predictions, lens: Lens | None) -> Iterator[tuple[PrototypeUse, ...]]:
    """Yield the prototypes in use at each position, by contribution, largest first."""
    routing, parts = split.routing, split.parts
    # Those that are not in use come last.
    keys = parts.contributions.masked_fill(routing.activations <= 0, -torch.inf)
    order = keys.argsort(dim=1, descending=True, stable=True)
    figures = (routing.activations, routing.cosines, parts.contributions, parts.evidence)
    columns = (column.gather(1, order).tolist() for column in (routing.indices, *figures))
    counts = (routing.activations > 0).sum(1).tolist()
    known = (None, None) if lens is None else (lens.names, lens.categories)
    for count, (indices, *rows) in zip(counts, zip(*columns, strict=True), strict=True):
        used = indices[:count]
        names, categories = ([None if one is None else one[i] for i in used] for one in known)
        # As many as are in use: figures of the others are cut off with them.
        yield tuple(map(PrototypeUse, used, *rows, names, categories))
