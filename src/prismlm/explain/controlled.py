"""What a controller does to one answer: which turned prototypes moved it, and their texts.

Where two answers part, after the same tokens, the one without the controller has the token x and
the one with it y. What y gains on x is, exactly,

    Δ = Σ_i Δ_i        Δ_i = (s_i − 1) · scale · α_i (W_y − W_x)·p_i

over the turned prototypes that are active in the state between them.
"""

from __future__ import annotations

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

CONTEXTS = 3


@torch.no_grad()
def compare_answers(
    lm: PrismLM,
    text: str | Messages,
    controller: Controller,
    generate: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare ``generate`` tokens after a text, or with 0 the top token, with and without.

    Returns the part ``controller`` of ``prismlm explain --json``: both texts; the ``position`` of
    the last token that they share, None if they are the same; the two tokens after it; ``gap``, the
    logit of x less that of y without the controller; Δ, ``gained``; and ``moves`` of the turned
    prototypes by |Δ_i|, with ``contexts`` of the lens, nearest first.
    """
    prompt = lm.encode(text, generate)
    how = max(1, generate), temperature if generate else 0.0, seed
    with recording_codes(lm.model) as codes:
        before = lm.write(prompt, *how)[0].tolist()
    with lm.edit(controller):
        after = lm.write(prompt, *how)[0].tolist()
    without, with_it = (lm.words(ids[prompt.shape[1] :]) for ids in (before, after))
    report = {"without": without, "with_it": with_it, "position": None, "token_without": ""}
    report |= {"token_with": "", "gap": 0.0, "gained": 0.0, "moves": []}
    pairs = enumerate(zip(before, after, strict=False))
    parted = next((n for n, (x, y) in pairs if x != y), None)
    if parted is None:
        return report
    tokens = x, y = before[parted], after[parted]
    ids = torch.tensor([after[:parted]], device=lm.model.device)
    with capture(lm.model, logits=False) as captured:
        lm.model(**replay(ids, codes), use_cache=False)
    z, weight = captured.z[0, -1:], weight_of(lm.model)
    logits = lm.logit_map.before_softcap(output_embedding(lm.model)(z).float())
    moves = _moves(lm, controller, z.float(), (weight[y] - weight[x]).float())
    old, new = (token_alone(lm.tokenizer, token) for token in tokens)
    report |= {"position": parted - 1, "token_without": old, "token_with": new, "moves": moves}
    report["gap"] = float(logits[0, x] - logits[0, y])
    return report | {"gained": sum(move["gained"] for move in moves)}


def _moves(
    lm: PrismLM, controller: Controller, z: Tensor, contrast: Tensor
) -> list[dict[str, Any]]:
    routing, moves, lens = lm.head(z).routing, list[dict[str, Any]](), lm.lens
    active = dict(zip(routing.indices[0].tolist(), routing.activations[0].tolist(), strict=True))
    for i, s in controller.scales:
        if (alpha := active.get(i, 0.0)) > 0 and s != 1:
            along = lm.logit_map.scale * float(lm.head.prototypes[i].float() @ contrast)
            move = {"prototype": i, "name": None, "scale": s, "activation": alpha}
            move |= {"gained": (s - 1) * alpha * along, "contexts": []}
            if lens is not None:
                contexts = lens.index[lens.rows_of(i)][:CONTEXTS].to_pylist()
                move |= {"name": lens.names[i], "contexts": contexts}
            moves.append(move)
    return sorted(moves, key=lambda move: -abs(move["gained"]))
