"""Asking: a text is written token by token, each split into its prototypes, and then traced."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from prismlm.corpus.chat import ASSISTANT, Messages, asked
from prismlm.corpus.pieces import Piece, pieces_of
from prismlm.corpus.words import DITTO
from prismlm.errors import InputError
from prismlm.explain.steps import Step
from prismlm.explain.trace import Trace
from prismlm.explorer.session import Answer, Prompt, Session, within
from prismlm.explorer.streams import Tell, sent, streamed
from prismlm.files import json_text
from prismlm.pages.colours import colour
from prismlm.pages.trace import page
from prismlm.pages.trace_data import (
    Pool,
    behind,
    rounded,
    support_line,
    trace_data,
    visible,
)

AGAINST = 4
PASSAGES = 8


class Question(Prompt):
    """What is asked, after which answer (its id; none begins anew), and how to go on."""

    follows: str | None = Field(default=None, max_length=64)
    generate: int = Field(default=40, ge=0, le=1024)
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**53)


def routes(session: Session) -> APIRouter:
    """Return ``/ask`` and the questions about an answer."""
    router = APIRouter(tags=["ask"])

    @router.post(
        "/ask",
        summary="Write after a text; server-sent events: start, step, done or error",
        response_class=StreamingResponse,
    )
    async def ask(question: Question) -> StreamingResponse:
        session.line.check()
        answer = Answer(messages=_messages(session, question))
        text, pieces = await run_in_threadpool(lambda: _prompt(session, question, answer))
        session.keep(answer)
        how = question.model_dump(include={"generate", "temperature", "seed"})
        return streamed(
            session, answer, lambda tell: _write(session, answer, (text, how), pieces, tell)
        )

    @router.post("/answers/{key}/stop", summary="Stop writing")
    def stop(key: str) -> dict[str, bool]:
        session.answer(key).stop.set()
        return {"stopped": True}

    @router.get(
        "/answers/{key}/steps/{step}",
        summary="What stands behind one prediction",
        response_model=dict[str, Any],
    )
    def step(key: str, step: int) -> Response:
        one = _step_of(session.trace(key), step)
        pool = Pool(one.lens)
        found = rounded(behind(one, pool, PASSAGES)) | {"shared": pool.to_dict()}
        # As it is sent, and in this thread: others are waiting.
        return Response(sent(found), media_type="application/json")

    @router.get(
        "/answers/{key}/steps/{step}/against",
        summary="What speaks against it; server-sent events: estimated, done or error",
        response_class=StreamingResponse,
    )
    async def against(key: str, step: int) -> StreamingResponse:
        one = _step_of(session.trace(key), step)
        return streamed(session, Answer(), lambda tell: _against(one, tell))

    @router.get("/answers/{key}/chat.jsonl", summary="The messages up to the question")
    def chat(key: str) -> Response:
        messages = list(session.answer(key).messages)
        if not messages:
            raise InputError(f"the answer {key!r} is to a text, which has no messages.")
        up_to_it = messages[:-1] if messages[-1]["role"] == ASSISTANT else messages
        line = json_text({"messages": up_to_it}) + "\n"
        return _file(line.encode(), "chat.jsonl", "application/x-ndjson")

    @router.get("/answers/{key}/report.{kind}", summary="html, json or parquet")
    async def report(key: str, kind: str) -> Response:
        trace = session.trace(key)
        return await run_in_threadpool(lambda: _report(trace, kind))

    return router


def _messages(session: Session, question: Question) -> Messages:
    """Return the messages of a question, after those of the answer that it follows; none of a text.

    Raises:
        InputError: that answer is not here, not to its end, or not one to a question.
    """
    if question.follows is None:
        return asked(question.text) if question.chat else ()
    before = session.answer(question.follows).messages
    if not (question.chat and before and before[-1]["role"] == ASSISTANT):
        raise InputError(
            f"nothing can follow the answer {question.follows!r}: expected a question (chat) after "
            "the whole answer to another one."
        )
    return [*before, *asked(question.text)]


def _prompt(
    session: Session, question: Question, answer: Answer
) -> tuple[str | Messages, list[Piece]]:
    """Return what the model is given, and its tokens as they are shown.

    Raises:
        InputError: it is too long, or a question, and no chat template or one that refuses it.
    """
    lm, most = session.lm, session.limits.tokens
    text = answer.messages or question.text
    return text, pieces_of(lm.tokenizer, within(lm, text, question.generate, most, "explain"))


def _write(
    session: Session,
    answer: Answer,
    asked_for: tuple[str | Messages, dict[str, Any]],
    pieces: list[Piece],
    tell: Tell,
) -> None:
    """Tell the prompt's tokens, each step, and the finished trace."""
    known: set[int] = set()
    tell("start", {"id": answer.id, "tokens": [_text(piece) for piece in pieces]})

    def on_step(step: Step) -> bool:
        tell("step", _step(step, known))
        return not answer.stop.is_set()

    text, how = asked_for
    trace = session.lm.explain(text, on_step=on_step, **how)
    answer.trace = trace
    if answer.messages and trace.written:
        written = [step.target_id for step in trace if step.target_from == "generated"]
        said = session.lm.tokenizer.decode(written, skip_special_tokens=True)
        answer.messages = [*answer.messages, {"role": ASSISTANT, "content": str(said)}]
    tell("done", {"id": answer.id, **_finished(trace)})


def _text(piece: Piece) -> str:
    """Return a token as it stands in the text: characters of several tokens at the first."""
    return piece.text if piece.number == 1 else DITTO


def _step(step: Step, known: set[int]) -> dict[str, Any]:
    """Return a step as a column of slices, and the prototypes that were not told before."""
    new = {use.id: use for use in step.prototypes if use.id not in known}
    known.update(new)
    return rounded(
        {
            "token": visible(step.pieces[0].label),
            "target": visible(step.pieces[1].label),
            "text": _text(step.pieces[1]),
            "from": step.target_from,
            "position": step.position,
            "probability": step.probability,
            "logit": step.logit,
            "explained": step.explained_share,
            "bias": step.bias,
            "residual": step.residual,
            "uses": [[use.id, use.contribution] for use in step.prototypes],
            "prototypes": {
                str(number): [
                    use.name or f"prototype {number}",
                    use.category,
                    colour(use.category),
                ]
                for number, use in new.items()
            },
        }
    )


def _finished(trace: Trace) -> dict[str, Any]:
    """Return a trace as the static page shows it."""
    pool = Pool(trace.lens)
    data = trace_data(trace, pool, each=False)
    return {
        "trace": data,
        "notes": trace.notes,
        "shared": pool.to_dict(),
        "answer": trace.answer.strip(),
        "support": support_line(trace),
    }


def _step_of(trace: Trace, step: int) -> Trace:
    if not 0 <= step < len(trace):
        raise InputError(f"there is no step {step}: the answer has {len(trace):,}, from 0.")
    return trace[step : step + 1]


def _against(trace: Trace, tell: Tell) -> None:
    """Tell the passages by their estimates, and then as the model has read them again."""
    for event in ("estimated", "done"):
        pool = Pool(trace.lens)
        passages = trace.against(AGAINST, estimated=event == "estimated")
        found = rounded({"against": [pool.document(passage) for passage in passages]})
        tell(event, found | {"shared": pool.to_dict()})


def _report(trace: Trace, kind: str) -> Response:
    if kind == "html":
        return _file(page([trace]).encode(), "answer.html", "text/html; charset=utf-8")
    if kind == "json":
        text = json_text(trace.to_dict(by="domain"), indent=2)
        return _file(text.encode(), "answer.json", "application/json")
    if kind == "parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist([row for step in trace for row in step.rows()]), sink)
        data = sink.getvalue().to_pybytes()
        return _file(data, "answer.parquet", "application/vnd.apache.parquet")
    raise InputError(f"there is no report of kind {kind!r}: expected html, json or parquet.")


def _file(data: bytes, name: str, kind: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, media_type=kind, headers=headers)
