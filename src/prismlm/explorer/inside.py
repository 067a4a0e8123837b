"""Inside the model along one text: channels, attention, and the uncertainty fed back."""

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

# Of a map, which has a weight for each pair of tokens, and of codes taken token by token.
MOST_TOKENS = 256
# Weights are sent as whole numbers.
ONE = 10_000
STRONGEST = 8


class Read(BaseModel):
    """A text to look inside with."""

    text: str = Field(min_length=1)


class ReadLayer(Read):
    """A text, and the layer whose heads are shown."""

    layer: Annotated[int, Field(ge=0, lt=2**31)]


def routes(session: Session) -> APIRouter:
    """Return the routes under ``/inside``."""
    router = APIRouter(tags=["inside"])

    @router.get("/inside", summary="Which parts of the model can be looked at")
    def parts() -> dict[str, Any]:
        return _parts(session.lm.model)

    @router.post("/inside/channels", summary="Channels with their gates along a text")
    async def channels(read: Read) -> dict[str, Any]:
        return await session.line.run(lambda: _channels(session, read.text))

    @router.post("/inside/attention", summary="What the heads of a layer look at")
    async def attention(read: ReadLayer) -> dict[str, Any]:
        return await session.line.run(lambda: _attention(session, read))

    @router.post("/inside/feedback", summary="The uncertainty fed back to each token")
    async def feedback(read: Read) -> dict[str, Any]:
        return await session.line.run(lambda: _feedback(session, read.text))

    return router


def _parts(model: Any) -> dict[str, Any]:
    attention = None
    # A model of prototype mixers alone has none.
    with suppress(InputError):
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


def _attention(session: Session, read: ReadLayer) -> dict[str, Any]:
    """Return the weights of each row up to its own token, in ten thousandths."""
    session.tokens(read.text, 0, "inspect attention", MOST_TOKENS)
    model = session.lm.model
    heads = heads_of(model, layer=read.layer)
    found = read_maps(model, session.lm.tokenizer, read.text, heads)
    maps = [
        {
            "head": one.head.head,
            "group": one.head.group,
            "number": one.head.group_head,
            "title": one.head.title,
            "weights": [
                row[: t + 1]
                for t, row in enumerate((one.weights * ONE).round().to(torch.int64).tolist())
            ],
            "on_itself": rounded(one.on_itself()),
            "strongest": [rounded(list(link)) for link in one.strongest(STRONGEST)],
        }
        for one in found
    ]
    tokens = [visible(token) for token in found[0].tokens]
    return {"layer": read.layer, "tokens": tokens, "maps": maps}


def _feedback(session: Session, text: str) -> dict[str, Any]:
    """Return what is fed back when the model writes the text token by token."""
    ids = session.tokens(text, 0, "inspect uncertainty-feedback", MOST_TOKENS)
    if len(ids) < 2:
        raise InputError("the text is one token, to which nothing is fed back: give a longer one.")
    codes, _ = recursion(session.lm.model, [torch.tensor(ids)])
    labels = [visible(piece.label) for piece in pieces_of(session.lm.tokenizer, ids)]
    return rounded({"tokens": labels, "fed": fed_back(session.lm.model, codes[0])})
