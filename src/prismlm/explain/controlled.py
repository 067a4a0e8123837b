"""What a controller does to one answer: which turned prototypes moved it, and their texts.

Where two answers part, after the same tokens, the one without the controller has the token x and
the one with it y. What y gains on x is, exactly,

    Δ = Σ_i Δ_i        Δ_i = (s_i − 1) · scale · α_i (W_y − W_x)·p_i

over the turned prototypes that are active in the state between them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from prismlm.corpus.chat import Messages
from prismlm.corpus.pieces import token_alone
from prismlm.explain.language_model import PrismLM
from prismlm.interventions.controller import Controller
from prismlm.models.seam import capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import recording_codes, replay

# Contexts of a prototype, and characters before its token.
CONTEXTS, AROUND = 3, 50


@dataclass(frozen=True)
class Move:
    """One turned prototype, and what y gained on x through it."""

    prototype: int
    name: str | None
    scale: float
    activation: float
    gained: float  # Δ_i, in logits
    contexts: tuple[dict[str, Any], ...]  # of the lens, nearest first: doc_id, title, license, text


@dataclass(frozen=True)
class Controlled:
    """An answer with a controller, beside the one without."""

    without: str  # the answer without it, or the token after a text that was only read
    with_it: str
    position: int | None  # of the last token that both share; None if the answers are the same
    token_without: str = ""
    token_with: str = ""
    gap: float = 0.0  # logit of x less that of y there, without the controller
    moves: tuple[Move, ...] = ()  # by |Δ_i|, largest first

    @property
    def gained(self) -> float:
        """Δ: what y gained on x, in logits."""
        return sum(move.gained for move in self.moves)

    def to_dict(self) -> dict[str, Any]:
        """Return the part ``controller`` of ``prismlm explain --json``."""
        return asdict(self) | {"gained": self.gained}


@torch.no_grad()
def compare_answers(
    lm: PrismLM,
    text: str | Messages,
    controller: Controller,
    generate: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
) -> Controlled:
    """Compare ``generate`` tokens after a text, or with 0 the top token, with and without."""
    prompt = lm.encode(text, generate)
    how = max(1, generate), temperature if generate else 0.0, seed
    with recording_codes(lm.model) as codes:
        before = lm.write(prompt, *how)[0].tolist()
    with lm.edit(controller):
        after = lm.write(prompt, *how)[0].tolist()
    without, with_it = (lm.words(ids[prompt.shape[1] :]) for ids in (before, after))
    pairs = enumerate(zip(before, after, strict=False))
    parted = next((n for n, (x, y) in pairs if x != y), None)
    if parted is None:
        return Controlled(without, with_it, None)
    x, y = before[parted], after[parted]
    ids = torch.tensor([after[:parted]], device=lm.model.device)
    with capture(lm.model, logits=False) as captured:
        lm.model(**replay(ids, codes), use_cache=False)
    z, weight = captured.z[0, -1:].float(), weight_of(lm.model)
    logits = lm.logit_map.before_softcap(output_embedding(lm.model)(captured.z[0, -1:]).float())
    old, new = (token_alone(lm.tokenizer, token) for token in (x, y))
    gap = float(logits[0, x] - logits[0, y])
    moves = _moves(lm, controller, z, (weight[y] - weight[x]).float())
    return Controlled(without, with_it, parted - 1, old, new, gap, moves)


def _moves(lm: PrismLM, controller: Controller, z: Tensor, contrast: Tensor) -> tuple[Move, ...]:
    routing, scales = lm.head(z).routing, dict(controller.scales)
    active = zip(routing.indices[0].tolist(), routing.activations[0].tolist(), strict=True)
    moves = [
        Move(
            i,
            None if lm.lens is None else lm.lens.names[i],
            scales[i],
            alpha,
            (scales[i] - 1)
            * lm.logit_map.scale
            * alpha
            * float(lm.head.prototypes[i].float() @ contrast),
            _contexts(lm, i),
        )
        for i, alpha in active
        if alpha > 0 and scales.get(i, 1.0) != 1
    ]
    return tuple(sorted(moves, key=lambda move: -abs(move.gained)))


def _contexts(lm: PrismLM, prototype: int) -> tuple[dict[str, Any], ...]:
    if lm.lens is None:
        return ()
    rows = lm.lens.index.slice(lm.lens.rows_of(prototype).start, CONTEXTS).to_pylist()
    found: list[dict[str, Any]] = []
    for row in rows:
        if row["prototype"] == prototype:
            # A lens without text has null here.
            before, token, after = (row[name] or "" for name in ("before", "token", "after"))
            text = f"…{before[-AROUND:]}[{token}]{after[: AROUND // 2]}…"
            found.append({n: row[n] for n in ("doc_id", "title", "license")} | {"text": text})
    return tuple(found)
