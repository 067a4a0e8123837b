"""Inside the model along one text: channels, attention, and the uncertainty fed back."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from fastapi import APIRouter
from pydantic import BaseModel, Field

from prismlm.corpus.pieces import pieces_of
from prismlm.errors import InputError
from prismlm.explain.attention_maps import AttentionMap, Head, heads_of, read_maps
from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import fed_back
from prismlm.explorer.session import Session, within
from prismlm.models.attention import attention_layers
from prismlm.models.decoders.mixers import has_mixers
from prismlm.models.uncertainty_feedback import uncertainty_of
from prismlm.pages.channels_data import page_data
from prismlm.pages.trace_data import rounded, visible
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
    lm = session.lm

    @router.get("/inside", summary="Which parts of the model can be looked at")
    def parts() -> dict[str, Any]:
        return _parts(lm)

    @router.post("/inside/channels", summary="Channels with their gates along a text")
    async def channels(read: Read) -> dict[str, Any]:
        return await session.line.run(lambda: _channels(session, read.text))

    @router.post("/inside/attention", summary="What the heads of a layer look at")
    async def attention(read: ReadLayer) -> dict[str, Any]:
        return await session.line.run(lambda: _attention(lm, read))

    @router.post("/inside/feedback", summary="The uncertainty fed back to each token")
    async def feedback(read: Read) -> dict[str, Any]:
        return await session.line.run(lambda: _feedback(lm, read.text))

    return router


def _parts(lm: PrismLM) -> dict[str, Any]:
    feedback = uncertainty_of(lm.model)
    try:
        layers = len(attention_layers(lm.model))
    except InputError:
        layers = 0
    return {
        "channels": has_mixers(lm.model),
        "attention": {
            "layers": layers,
            "heads": [_head(one) for one in heads_of(lm.model, layer=0)],
        }
        if layers
        else None,
        "feedback": None if feedback is None else {"levels": feedback.embedding.levels},
        "tokens": MOST_TOKENS,
    }


def _head(head: Head) -> dict[str, Any]:
    return {"head": head.head, "group": head.group, "number": head.number}


def _channels(session: Session, text: str) -> dict[str, Any]:
    lm = session.lm
    within(lm, text, 0, session.limits.tokens, "inspect channels")
    return page_data(lm.model, None, channel_report(lm.model, lm.tokenizer, text=text))


def _attention(lm: PrismLM, read: ReadLayer) -> dict[str, Any]:
    within(lm, read.text, 0, MOST_TOKENS, "inspect attention")
    heads = heads_of(lm.model, layer=read.layer)
    maps = read_maps(lm.model, lm.tokenizer, read.text, heads)
    tokens = [visible(token) for token in maps[0].tokens]
    return {"layer": read.layer, "tokens": tokens, "maps": [_map(one) for one in maps]}


def _map(one: AttentionMap) -> dict[str, Any]:
    """Return the weights of each row up to its own token, in ten thousandths."""
    rows = (one.weights * ONE).round().to(torch.int64).tolist()
    return _head(one.head) | {
        "title": one.head.title,
        "weights": [row[: t + 1] for t, row in enumerate(rows)],
        "on_itself": rounded(one.on_itself()),
        "strongest": [rounded(list(link)) for link in one.strongest(STRONGEST)],
    }


def _feedback(lm: PrismLM, text: str) -> dict[str, Any]:
    """Return what is fed back when the model writes the text token by token."""
    ids = within(lm, text, 0, MOST_TOKENS, "inspect uncertainty-feedback")
    if len(ids) < 2:
        raise InputError("the text is one token, to which nothing is fed back: give a longer one.")
    codes, _ = recursion(lm.model, [torch.tensor(ids)])
    fed = fed_back(lm.model, codes[0])
    assert fed is not None
    labels = [visible(piece.label) for piece in pieces_of(lm.tokenizer, ids)]
    return rounded({"tokens": labels, "fed": [list(one) for one in fed]})
