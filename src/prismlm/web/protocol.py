"""Requests and answers in the form of OpenAI's API, and what prismlm adds to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedTokenizerBase

from prismlm.corpus.chat import ASSISTANT, Messages
from prismlm.corpus.pieces import BROKEN, decode_token
from prismlm.errors import shown
from prismlm.explain.trace import Trace
from prismlm.lens.opened_model import MIN_TEMPERATURE
from prismlm.web.writing import Choice, Wanted

STOPS, LONGEST_STOP = 16, 1000
MOST_DOCUMENTS = 20
# What would change an answer if it were heeded, and the values that ask for nothing.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "echo": (False,),
    "suffix": ("",),
}
Column = Literal["document", "source", "domain", "license"]
OneStop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stop = OneStop | Annotated[list[OneStop], Field(max_length=STOPS)]


class RequestError(Exception):
    """A request that is answered by an error in OpenAI's form.

    Args:
        message: what is wrong, what was expected.
        status: of HTTP.
        param: the field of the request.
        code: what programs tell errors apart by.
    """

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Shares(BaseModel):
    """What the ``prismlm`` object of an answer is to hold.

    Attributes:
        by: the column that shares are by; otherwise domain, or source where all have one.
        documents: documents, passages and verbatim spans, at most so many of each.
    """

    by: Column | None = None
    documents: int = Field(default=5, ge=1, le=MOST_DOCUMENTS)


class Asked(BaseModel):
    """What every request has: the model's name, and whether to say what the answer relies on."""

    model_config = ConfigDict(extra="allow")
    model: str
    prismlm: bool | Shares = True

    @property
    def shares(self) -> Shares | None:
        """What is to be said of the answer's sources; None for nothing."""
        return (
            self.prismlm if isinstance(self.prismlm, Shares) else Shares() if self.prismlm else None
        )

    def check(self) -> None:
        """Raise RequestError for what is asked for and not served."""
        for name, neutral in NOT_SERVED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in neutral:
                raise RequestError(
                    f"{name}={shown(value)} is not supported by this server: leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )


class Message(BaseModel):
    """One message of a chat: its content is a text, or parts that are texts."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


class ToWrite(Asked):
    """What a request to write has besides."""

    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=10, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = None
    stop: Stop | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that were asked for."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens are told with each; None for no log-probabilities."""
        return None

    def wanted(self, tokens: int) -> Wanted:
        """Return how up to so many tokens are to be written."""
        heat = self.temperature or 0.0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Wanted(
            tokens=tokens,
            temperature=heat if heat >= MIN_TEMPERATURE else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(63) if self.seed is None else self.seed % 2**63,
            stop=tuple(one for one in stop if one),
            alternatives=self.alternatives,
            traced=self.shares is not None,
        )


class ChatRequest(ToWrite):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that were asked for, by the new name or the old one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens are told with each; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(ToWrite):
    """The body of ``/v1/completions``: one prompt, of text."""

    prompt: str | list[Any]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens: as OpenAI has it, few unless more are asked for."""
        return self.max_tokens or 16

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens are told with each; None for no log-probabilities."""
        return self.logprobs


class AttributionRequest(Asked):
    """The body of ``/v1/attributions``: messages or a prompt, with an answer of any engine.

    The answer is ``answer``, or the last of the messages, if that is the assistant's.
    """

    messages: list[Message] | None = None
    prompt: str | None = None
    answer: str | None = None


def messages_of(given: Sequence[Message]) -> Messages:
    """Return messages as a chat template takes them.

    Raises:
        RequestError: images, sound or tools in them.
    """
    return [
        {"role": "system" if one.role == "developer" else one.role, "content": _text(one, number)}
        for number, one in enumerate(given)
    ]


def _text(message: Message, number: int) -> str:
    where, extra = f"messages[{number}]", message.model_extra or {}
    tools = {"tool_calls", "function_call", "tool_call_id"} & {k for k, v in extra.items() if v}
    if message.role in ("tool", "function") or tools:
        raise RequestError(
            f"{where} is of tools, which this server does not support.",
            param=where,
            code="unsupported_parameter",
        )
    if isinstance(message.content, str):
        return message.content
    parts: list[str] = []
    for part in message.content or []:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where} has a part of the type {str(part.get('type'))[:40]!r}: this server reads "
                "text alone.",
                param=f"{where}.content",
                code="unsupported_parameter",
            )
        parts.append(part["text"])
    if message.content is None:
        raise RequestError(f"{where} has no content.", param=f"{where}.content")
    return "".join(parts)


def prompt_of(given: str | list[Any]) -> str:
    """Return the one prompt of a request.

    Raises:
        RequestError: several, or token ids.
    """
    if isinstance(given, str):
        return given
    if len(given) == 1 and isinstance(given[0], str):
        return given[0]
    raise RequestError(
        "this server takes one prompt a request, as text: neither several nor token ids.",
        param="prompt",
        code="unsupported_parameter",
    )


def answered(request: AttributionRequest) -> tuple[str | Messages, str | Messages, str]:
    """Return what was asked, the same with the answer, and the answer.

    Raises:
        RequestError: not exactly one of messages and prompt, or no answer.
    """
    if (request.messages is None) == (request.prompt is None):
        raise RequestError("expected either messages or a prompt.", param="messages")
    answer = request.answer
    if request.messages is None:
        if not answer:
            raise RequestError("expected the answer to the prompt.", param="answer")
        prompt = request.prompt or ""
        return prompt, prompt + answer, answer
    messages = list(messages_of(request.messages))
    if answer is None and messages and messages[-1]["role"] == ASSISTANT:
        answer = messages.pop()["content"]
    if not answer or not messages:
        raise RequestError(
            "expected messages with an answer to them: the last of them, or `answer`.",
            param="answer",
        )
    return messages, [*messages, {"role": ASSISTANT, "content": answer}], answer


def prismlm_object(trace: Trace, shares: Shares) -> dict[str, Any]:
    """Return what an answer relies on, as the ``prismlm`` object of a response."""
    lens, support, most = trace.lens, trace.support, shares.documents
    assert lens is not None
    value: dict[str, Any] = {
        "support": None
        if support is None
        else {"level": support.level, "score": support.score, "sentence": support.sentence},
        "summary": trace.summary,
        "documents": [
            one.to_dict() | {"title": one.title, "domain": one.domain, "url": one.url}
            for one in trace.documents(most)
        ],
        "passages": [one.to_dict() for one in trace.passages(most)],
        "sources": trace.sources(shares.by or lens.default_group_by).to_dict(),
        "verbatim": [],
        "notes": trace.notes,
        "lens": {"name": lens.name, "corpus": lens.meta.corpus_name},
    }
    if lens.suffixes is not None:
        value["verbatim"] = [one.to_dict() for one in trace.verbatim(most)]
    return value


def url_citations(trace: Trace, answer: str) -> list[dict[str, Any]]:
    """Return the documents with an address that an answer cites, sentence by sentence."""
    read = trace.answer
    # A chat template may leave out the blanks around an answer.
    moved = answer.find(read.strip()) - (len(read) - len(read.lstrip()))
    cited = trace.citations() if read.strip() in answer else []
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": one.start + moved,
                "end_index": one.end + moved,
                "title": one.document["title"] or one.document["doc_id"],
                "url": one.document["url"],
            },
        }
        for one in cited
        if one.document["url"]
    ]


def identity(kind: str) -> str:
    """Return an id that nobody can guess."""
    return f"{kind}-{secrets.token_hex(12)}"


class Shape:
    """Puts one answer, or the chunks of its stream, into OpenAI's form.

    Args:
        model: its name.
        chat: whether it is an answer in a chat.
        tokenizer: for the words of log-probabilities.

    Attributes:
        id: of the response.
    """

    def __init__(self, model: str, chat: bool, tokenizer: PreTrainedTokenizerBase) -> None:
        self.chat, self._tokenizer = chat, tokenizer
        self.id = identity("chatcmpl" if chat else "cmpl")
        self._about = {"id": self.id, "created": int(time.time()), "model": model}

    def framed(
        self,
        said: dict[str, Any] | None,
        reason: str | None = None,
        choices: Sequence[Choice] | None = None,
        *,
        chunk: bool = False,
    ) -> dict[str, Any]:
        """Return a response, or a chunk of a stream.

        Args:
            said: the message, or what is new of it, with ``content``; None for no choice at all.
            reason: why it ended.
            choices: tokens with log-probabilities; None where none were asked for.
            chunk: whether it is a part of a stream.
        """
        kind = ("chat.completion" + ".chunk" * chunk) if self.chat else "text_completion"
        framed = {**self._about, "object": kind, "choices": []}
        if said is not None:
            about = {"index": 0, "finish_reason": reason, "logprobs": self._logprobs(choices)}
            name = "delta" if chunk else "message"
            body = {name: said} if self.chat else {"text": said.get("content") or ""}
            framed["choices"] = [about | body]
        return framed

    def _logprobs(self, choices: Sequence[Choice] | None) -> dict[str, Any] | None:
        if choices is None:
            return None
        if self.chat:
            content = [
                self._logprob(one.token, one.log_probability)
                | {"top_logprobs": [self._logprob(*other) for other in one.others]}
                for one in choices
            ]
            return {"content": content, "refusal": None}
        words = [decode_token(self._tokenizer, one.token) for one in choices]
        others = [
            {decode_token(self._tokenizer, token): value for token, value in one.others}
            for one in choices
        ]
        return {
            "tokens": words,
            "token_logprobs": [one.log_probability for one in choices],
            "top_logprobs": others,
            "text_offset": [sum(map(len, words[:number])) for number in range(len(words))],
        }

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        word = decode_token(self._tokenizer, token)
        # A part of a character has no bytes in UTF-8 of its own.
        data = None if BROKEN in word else list(word.encode())
        return {"token": word, "logprob": value, "bytes": data}


def usage_of(prompt: int, written: int) -> dict[str, Any]:
    """Return how many tokens were read and written, as a part of a response."""
    total = {"total_tokens": prompt + written}
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": written} | total}
