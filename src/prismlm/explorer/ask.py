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
from prismlm.errors import InputError
from prismlm.explain.steps import Step
from prismlm.explain.trace import Trace
from prismlm.explorer.session import Answer, Session, Shown, Tell, Writing, attachment
from prismlm.files import json_text
from prismlm.pages.frame import rounded
from prismlm.pages.trace import Pool, behind, page, spelt, step_data, trace_data

AGAINST = 4
PASSAGES = 8


class Question(Writing):
    """What is asked, after which answer (its id; none begins anew), and how to go on."""

    follows: str | None = Field(default=None, max_length=64)


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
        text, tokenizer = answer.messages or question.text, session.lm.tokenizer
        pieces = await run_in_threadpool(
            lambda: pieces_of(tokenizer, session.tokens(text, question.generate, "explain"))
        )
        session.keep(answer)
        return session.streamed(
            answer, lambda tell: _write(session, answer, text, question.how, pieces, tell)
        )

    @router.post("/answers/{key}/stop", summary="Stop writing")
    def stop(key: str) -> dict[str, bool]:
        session.answer(key).stop.set()
        return {"stopped": True}

    @router.get("/answers/{key}/steps/{step}", summary="What stands behind one prediction")
    def step(key: str, step: int) -> Response:
        one = _step_of(session.trace(key), step)
        pool = Pool(one.lens)
        # As it is sent, and in this thread: others are waiting.
        return Shown(rounded(behind(one, pool, PASSAGES)) | {"shared": pool.to_dict()})

    @router.get(
        "/answers/{key}/steps/{step}/against",
        summary="What speaks against it; server-sent events: estimated, done or error",
        response_class=StreamingResponse,
    )
    async def against(key: str, step: int) -> StreamingResponse:
        one = _step_of(session.trace(key), step)
        return session.streamed(Answer(), lambda tell: _against(one, tell))

    @router.get("/answers/{key}/chat.jsonl", summary="The messages up to the question")
    def chat(key: str) -> Response:
        messages = list(session.answer(key).messages)
        if not messages:
            raise InputError(f"the answer {key!r} is to a text, which has no messages.")
        up_to_it = messages[:-1] if messages[-1]["role"] == ASSISTANT else messages
        line = json_text({"messages": up_to_it}) + "\n"
        return attachment(line, "chat.jsonl", "application/x-ndjson")

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


def _write(
    session: Session,
    answer: Answer,
    text: str | Messages,
    how: dict[str, Any],
    pieces: list[Piece],
    tell: Tell,
) -> None:
    """Tell the prompt's tokens, each step with the prototypes not told before, and the trace."""
    tell("start", {"id": answer.id, "tokens": [spelt(piece) for piece in pieces]})
    told = Pool(session.lm.lens)

    def on_step(step: Step) -> bool:
        before = set(told.prototypes)
        value = step_data(step, told, contexts=False)
        new = {n: one for n, one in told.prototypes.items() if n not in before}
        tell("step", rounded(value) | {"prototypes": new})
        return not answer.stop.is_set()

    trace = session.lm.explain(text, on_step=on_step, **how)
    answer.trace = trace
    if answer.messages and trace.written:
        written = [step.target_id for step in trace if step.target_from == "generated"]
        said = session.lm.tokenizer.decode(written, skip_special_tokens=True)
        answer.messages = [*answer.messages, {"role": ASSISTANT, "content": str(said)}]
    pool = Pool(trace.lens)
    value = trace_data(trace, pool, each=False)
    tell("done", value | {"id": answer.id, "shared": pool.to_dict()})


def _step_of(trace: Trace, step: int) -> Trace:
    if not 0 <= step < len(trace):
        raise InputError(f"there is no step {step}: the answer has {len(trace):,}, from 0.")
    return trace[step : step + 1]


def _against(trace: Trace, tell: Tell) -> None:
    """Tell the passages by their estimates, and then as the model has read them again."""
    for event in ("estimated", "done"):
        pool = Pool(trace.lens)
        passages = trace.against(AGAINST, estimated=event == "estimated")
        found = rounded({"against": [pool.shared(passage) for passage in passages]})
        tell(event, found | {"shared": pool.to_dict()})


def _report(trace: Trace, kind: str) -> Response:
    if kind == "html":
        return attachment(page([trace]), "answer.html", "text/html; charset=utf-8")
    if kind == "json":
        text = json_text(trace.to_dict(by="domain"), indent=2)
        return attachment(text, "answer.json", "application/json")
    if kind == "parquet":
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist([row for step in trace for row in step.rows()]), sink)
        data = sink.getvalue().to_pybytes()
        return attachment(data, "answer.parquet", "application/vnd.apache.parquet")
    raise InputError(f"there is no report of kind {kind!r}: expected html, json or parquet.")
