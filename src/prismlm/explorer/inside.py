"""Routes of the view "Inside": channels, attention and uncertainty feedback along one text."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import BaseModel, Field

from prismlm.corpus.pieces import pieces_of, visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, heads_of, read_maps
from prismlm.explain.prediction import fed_back
from prismlm.explorer.session import Session
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.protot import has_mixers
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.pages.channels import channels_data
from prismlm.pages.frame import rounded
from prismlm.probes.channels import channel_report
from prismlm.probes.uncertainty_feedback.signal import recursion

# Tokens of a map, which has a weight for each pair, and of codes computed token by token.
MAX_TOKENS = 256
# Weights are sent as integers, in units of 1 / WEIGHT_SCALE.
WEIGHT_SCALE = 10_000
STRONGEST_LINKS = 8


class Text(BaseModel):
    """A text to read."""

    text: str = Field(min_length=1)


class LayerText(Text):
    """A text, and the layer whose heads are shown."""

    layer: Annotated[int, Field(ge=0, lt=2**31)]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/inside``."""
    router, lm, queue = APIRouter(tags=["inside"]), session.lm, session.queue

    @router.get("/inside", summary="Which parts of the model can be looked at")
    def parts() -> dict[str, Any]:
        attention, feedback = None, uncertainty_of(lm.model)
        with suppress(InputError):  # a model without attention
            attention = {"layers": len(attention_layers(lm.model))}
        return {
            "channels": has_mixers(lm.model),
            "attention": attention,
            "feedback": None if feedback is None else {"levels": feedback.embedding.levels},
        }

    @router.post("/inside/channels", summary="Channels with their gates along a text")
    async def channels(body: Text) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            session.tokens(body.text)
            report = channel_report(lm.model, lm.tokenizer, text=body.text)
            return channels_data(lm.model, None, report)

        return await queue.run(work)

    @router.post("/inside/attention", summary="What the heads of a layer look at")
    async def attention(body: LayerText) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            session.tokens(body.text, limit=MAX_TOKENS)
            heads = heads_of(lm.model, layer=body.layer)
            maps = read_maps(lm.model, lm.tokenizer, body.text, heads)
            tokens = [visible(token) for token in maps[0].tokens]
            return {"layer": body.layer, "tokens": tokens, "maps": [_map(m) for m in maps]}

        return await queue.run(work)

    @router.post("/inside/feedback", summary="The uncertainty fed back to each token")
    async def feedback(body: Text) -> dict[str, Any]:
        return await queue.run(lambda: _feedback(session, body.text))

    return router


def _map(attention_map: AttentionMap) -> dict[str, Any]:
    head, weights = attention_map.head, (attention_map.weights * WEIGHT_SCALE).round().long()
    links = attention_map.strongest(STRONGEST_LINKS)
    return {
        "head": head.head,
        "group": head.group,
        "number": head.group_head,
        "title": head.title,
        # Each row up to its own token.
        "weights": [row[: t + 1] for t, row in enumerate(weights.tolist())],
        "on_itself": rounded(attention_map.on_itself()),
        "strongest": rounded([list(link) for link in links]),
    }


def _feedback(session: Session, text: str) -> dict[str, Any]:
    """Return the feedback as if the model generated the text token by token."""
    ids = session.tokens(text, limit=MAX_TOKENS)
    if len(ids) < 2:
        raise InputError("the text is one token, to which nothing is fed back: give a longer one.")
    codes, _ = recursion(session.lm.model, [torch.tensor(ids)])
    labels = [visible(piece.label) for piece in pieces_of(session.lm.tokenizer, ids)]
    fed = fed_back(session.lm.model, codes[0]) or []
    return rounded({"tokens": labels, "fed": [shares or (None, None) for shares in fed]})
