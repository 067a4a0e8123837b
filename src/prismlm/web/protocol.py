"""Requests and responses of OpenAI's API, and prismlm's additions to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.corpus.pieces import BROKEN, decode_token
from prismlm.errors import shown
from prismlm.explain.trace import Trace
from prismlm.lens.opened_model import MIN_TEMPERATURE
from prismlm.web.generation import Sampling, TokenLogProbs

MAX_DOCUMENTS = 20
# Parameters that change no answer.
NEUTRAL = {
    "user", "safety_identifier", "metadata", "store", "service_tier", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls",
}  # fmt: skip
# Parameters that would change an answer, with the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "suffix": ("",),
    "modalities": (["text"],), "logit_bias": ({},), "frequency_penalty": (0,), "echo": (False,),
    "presence_penalty": (0,), "repetition_penalty": (1,), "top_k": (0, -1), "min_p": (0,),
}  # fmt: skip
Column = Literal["document", "source", "domain", "license"]


class RequestError(Exception):
    """A bad request: message, HTTP status, field of the request and machine-readable code."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Shares(BaseModel):
    """Contents of the ``prismlm`` object: the column of shares, and how many documents, passages
    and verbatim spans.
    """

    model_config = ConfigDict(extra="forbid")
    by: Column | None = None  # domain, or source if there is only one domain
    documents: int = Field(default=5, ge=1, le=MAX_DOCUMENTS)


class ModelRequest(BaseModel):
    """Common fields: the model's name, and whether to attribute the answer."""

    model_config = ConfigDict(extra="allow")
    model: str
    prismlm: bool | Shares = True

    @property
    def shares(self) -> Shares | None:
        """Contents of the ``prismlm`` object; None to leave it out."""
        if isinstance(self.prismlm, Shares):
            return self.prismlm
        return Shares() if self.prismlm else None


class TextPart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat, of text alone: without images, sound and tools."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    tool_calls: Annotated[list[Any] | None, Field(max_length=0)] = None
    function_call: None = None

    def to_dict(self) -> dict[str, str]:
        """Return the message as a chat template takes it."""
        parts = [self.content] if isinstance(self.content, str) else [p.text for p in self.content]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(parts)}


class GenerationRequest(ModelRequest):
    """Common fields of the two requests that generate."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def refuse_unsupported(self) -> Self:
        """Raise RequestError for parameters that would change an answer, or are unknown."""
        for name, value in (self.model_extra or {}).items():
            if not (value is None or name in NEUTRAL or value in UNSUPPORTED.get(name, ())):
                raise RequestError(
                    f"{name}={shown(value)} is not supported by this server: leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )
        return self

    def sampling(self, max_tokens: int, alternatives: int | None) -> Sampling:
        """Return how to generate up to ``max_tokens`` tokens; ``alternatives`` as of Sampling."""
        heat = self.temperature or 0.0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            max_tokens,
            temperature=heat if heat >= MIN_TEMPERATURE else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**63,
            stop=tuple(filter(None, stop)),
            alternatives=alternatives,
            traced=self.shares is not None,
        )


class ChatRequest(GenerationRequest):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def source(self) -> Messages:
        """The model's input."""
        return [message.to_dict() for message in self.messages]

    @property
    def token_limit(self) -> int | None:
        """The new parameter or the deprecated one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of top tokens to report with each; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None


class CompletionRequest(GenerationRequest):
    """The body of ``/v1/completions``: one prompt, of text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def source(self) -> str:
        """The model's input."""
        return "".join(self.prompt)

    @property
    def token_limit(self) -> int | None:
        """The requested maximum; OpenAI's default is 16."""
        return self.max_tokens or 16

    @property
    def alternatives(self) -> int | None:
        """As of :class:`ChatRequest`."""
        return self.logprobs


WritingRequest = ChatRequest | CompletionRequest


class AttributionRequest(ModelRequest):
    """The body of ``/v1/attributions``: messages or a prompt, and an answer by any model.

    The answer is ``answer``, or else the last message if it is the assistant's.
    """

    messages: list[Message] | None = None
    prompt: str | None = None
    answer: str | None = None


def answer_of(request: AttributionRequest) -> tuple[str | Messages, str | Messages, str]:
    """Return the prompt, the prompt with the answer, and the answer of a request."""
    if (request.messages is None) == (request.prompt is None):
        raise RequestError("expected either messages or a prompt.", param="messages")
    answer = request.answer
    if request.messages is None:
        if not answer:
            raise RequestError("expected the answer to the prompt.", param="answer")
        prompt = request.prompt or ""
        return prompt, prompt + answer, answer
    messages = [message.to_dict() for message in request.messages]
    if answer is None and messages and messages[-1]["role"] == ASSISTANT:
        answer = messages.pop()["content"]
    if not answer or not messages:
        raise RequestError(
            "expected messages with an answer to them: the last of them, or `answer`.",
            param="answer",
        )
    return messages, [*messages, {"role": ASSISTANT, "content": answer}], answer


def sources_of(trace: Trace, answer: str, shares: Shares) -> dict[str, Any]:
    """Return the ``annotations`` of an answer, and its ``prismlm`` object: what it relies on."""
    lens, support = trace.lens, trace.support
    if lens is None:
        return {"annotations": [], "prismlm": None}
    value = {
        "support": support and support._asdict() | {"sentence": support.sentence},
        "verbatim": [],
        **trace.texts_behind(shares.by or lens.default_group_by, shares.documents),
        "notes": trace.notes,
        "lens": {"name": lens.name, "corpus": lens.meta.corpus_name},
    }
    return {"annotations": _url_citations(trace, answer), "prismlm": value}


def _url_citations(trace: Trace, answer: str) -> list[dict[str, Any]]:
    """Return the documents with a URL that an answer cites, sentence by sentence."""
    traced = trace.answer
    if traced.strip() not in answer:
        return []
    # A chat template may strip the answer.
    shift = answer.find(traced.strip()) - (len(traced) - len(traced.lstrip()))
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": citation.start + shift,
                "end_index": citation.end + shift,
                "title": citation.document["title"] or citation.document["doc_id"],
                "url": citation.document["url"],
            },
        }
        for citation in trace.citations()
        if citation.document["url"]
    ]


def unique_id(prefix: str) -> str:
    """Return an unguessable id."""
    return f"{prefix}-{secrets.token_hex(12)}"


class ResponseFormat:
    """Formats one response, or the chunks of its stream; ``id`` is the response's."""

    def __init__(self, model: str, chat: bool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.chat, self._tokenizer = chat, tokenizer
        self.id = unique_id("chatcmpl" if chat else "cmpl")
        self._common = {"id": self.id, "created": int(time.time()), "model": model}

    def response(
        self,
        message: dict[str, Any] | None,
        finish_reason: str | None = None,
        tokens: Sequence[TokenLogProbs] | None = None,
        *,
        chunk: bool = False,
    ) -> dict[str, Any]:
        """Return a response, or a chunk of a stream, with a message or its new part, if any."""
        kind = ("chat.completion" + ".chunk" * chunk) if self.chat else "text_completion"
        response = {**self._common, "object": kind, "choices": []}
        if message is not None:
            name = "delta" if chunk else "message"
            body = {name: message} if self.chat else {"text": message.get("content") or ""}
            choice = {"index": 0, "finish_reason": finish_reason}
            response["choices"] = [choice | {"logprobs": self._logprobs(tokens)} | body]
        return response

    def _logprobs(self, tokens: Sequence[TokenLogProbs] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        if self.chat:
            content = [
                self._logprob(token.token, token.log_probability)
                | {"top_logprobs": [self._logprob(*other) for other in token.alternatives]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        texts = [self._text(token.token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.log_probability for token in tokens],
            "top_logprobs": [
                {self._text(other): value for other, value in token.alternatives}
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _text(self, token: int) -> str:
        return decode_token(self._tokenizer, token)

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        # An incomplete character has no UTF-8 bytes of its own.
        data = None if BROKEN in text else list(text.encode())
        return {"token": text, "logprob": value, "bytes": data}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """Return the ``usage`` field of a response: numbers of tokens."""
    total = {"total_tokens": prompt + completion}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion} | total}
