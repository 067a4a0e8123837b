"""The inside of the model along one text: channels, attention, and uncertainty feedback."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import BaseModel, Field

from prismlm.corpus.pieces import pieces_of, visible
from prismlm.errors import InputError
from prismlm.explain.attention_maps import heads_of, read_maps
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
    router = APIRouter(tags=["inside"])

    @router.get("/inside", summary="Which parts of the model can be looked at")
    def parts() -> dict[str, Any]:
        return _parts(session.lm.model)

    @router.post("/inside/channels", summary="Channels with their gates along a text")
    async def channels(body: Text) -> dict[str, Any]:
        return await session.queue.run(lambda: _channels(session, body.text))

    @router.post("/inside/attention", summary="What the heads of a layer look at")
    async def attention(body: LayerText) -> dict[str, Any]:
        return await session.queue.run(lambda: _attention(session, body))

    @router.post("/inside/feedback", summary="The uncertainty fed back to each token")
    async def feedback(body: Text) -> dict[str, Any]:
        return await session.queue.run(lambda: _feedback(session, body.text))

    return router


def _parts(model: Any) -> dict[str, Any]:
    attention = None
    with suppress(InputError):  # a model without attention
        attention = {"layers": len(attention_layers(model))}
    feedback = uncertainty_of(model)
    return {
        "channels": has_mixers(model),
        "attention": attention,
        "feedback": None if feedback is None else {"levels": feedback.embedding.levels},
    }


def _channels(session: Session, text: str) -> dict[str, Any]:
    session.tokens(text, 0, "inspect channels")
    model = session.lm.model
    return channels_data(model, None, channel_report(model, session.lm.tokenizer, text=text))


def _attention(session: Session, body: LayerText) -> dict[str, Any]:
    session.tokens(body.text, 0, "inspect attention", MAX_TOKENS)
    lm = session.lm
    maps = read_maps(lm.model, lm.tokenizer, body.text, heads_of(lm.model, layer=body.layer))
    data = [
        {
            "head": m.head.head,
            "group": m.head.group,
            "number": m.head.group_head,
            "title": m.head.title,
            # Each row up to its own token.
            "weights": [
                row[: t + 1]
                for t, row in enumerate((m.weights * WEIGHT_SCALE).round().long().tolist())
            ],
            "on_itself": rounded(m.on_itself()),
            "strongest": [rounded(list(link)) for link in m.strongest(STRONGEST_LINKS)],
        }
        for m in maps
    ]
    return {"layer": body.layer, "tokens": [visible(t) for t in maps[0].tokens], "maps": data}


def _feedback(session: Session, text: str) -> dict[str, Any]:
    """Return the feedback as if the model generated the text token by token."""
    ids = session.tokens(text, 0, "inspect uncertainty-feedback", MAX_TOKENS)
    if len(ids) < 2:
        raise InputError("the text is one token, to which nothing is fed back: give a longer one.")
    codes, _ = recursion(session.lm.model, [torch.tensor(ids)])
    labels = [visible(piece.label) for piece in pieces_of(session.lm.tokenizer, ids)]
    return rounded({"tokens": labels, "fed": fed_back(session.lm.model, codes[0])})
