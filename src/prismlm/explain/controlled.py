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
from prismlm.lens.lens import Lens
from prismlm.models.seam import capture, output_embedding
from prismlm.models.sidecar import weight_of
from prismlm.models.uncertainty_feedback import recording_codes, replay

CONTEXTS = 3


@dataclass(frozen=True)
class Controlled:
    """An answer with a controller, beside the one without.

    ``moves`` are the turned prototypes, by |Δ_i|: ``prototype``, ``name``, ``scale``,
    ``activation``, ``gained`` (Δ_i, in logits), and ``contexts`` of the lens, nearest first.
    """

    without: str  # the answer without it, or the token after a text that was only read
    with_it: str
    position: int | None = None  # of the last token that both share; None if answers are the same
    token_without: str = ""
    token_with: str = ""
    gap: float = 0.0  # logit of x less that of y there, without the controller
    gained: float = 0.0  # Δ: what y gained on x, in logits
    moves: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the part ``controller`` of ``prismlm explain --json``."""
        return asdict(self)


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
        return Controlled(without, with_it)
    x, y = before[parted], after[parted]
    ids = torch.tensor([after[:parted]], device=lm.model.device)
    with capture(lm.model, logits=False) as captured:
        lm.model(**replay(ids, codes), use_cache=False)
    z, weight = captured.z[0, -1:], weight_of(lm.model)
    logits = lm.logit_map.before_softcap(output_embedding(lm.model)(z).float())
    moves = _moves(lm, controller, z.float(), (weight[y] - weight[x]).float())
    old, new = (token_alone(lm.tokenizer, token) for token in (x, y))
    gap, gained = float(logits[0, x] - logits[0, y]), sum(move["gained"] for move in moves)
    return Controlled(without, with_it, parted - 1, old, new, gap, gained, tuple(moves))


def _moves(
    lm: PrismLM, controller: Controller, z: Tensor, contrast: Tensor
) -> list[dict[str, Any]]:
    routing, moves = lm.head(z).routing, list[dict[str, Any]]()
    active = dict(zip(routing.indices[0].tolist(), routing.activations[0].tolist(), strict=True))
    for i, s in controller.scales:
        if (alpha := active.get(i, 0.0)) > 0 and s != 1:
            along = lm.logit_map.scale * float(lm.head.prototypes[i].float() @ contrast)
            move = {"prototype": i, "name": None if lm.lens is None else lm.lens.names[i]}
            move |= {"scale": s, "activation": alpha, "gained": (s - 1) * alpha * along}
            moves.append(move | {"contexts": [] if lm.lens is None else _contexts(lm.lens, i)})
    return sorted(moves, key=lambda move: -abs(move["gained"]))


def _contexts(lens: Lens, prototype: int) -> list[dict[str, Any]]:
    rows = lens.rows_of(prototype)
    return lens.index.slice(rows.start, min(CONTEXTS, rows.stop - rows.start)).to_pylist()
