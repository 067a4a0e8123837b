"""Questions to a language model behind an OpenAI-compatible endpoint, and the answers on disk.

Replies are untrusted: an answer has exactly the fields that the question names, or it is rejected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from string import Template
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from prismlm.errors import FormatError, InputError, check_number, check_text, check_whole, shown
from prismlm.files import check_json, json_text, room_to_write
from prismlm.progress import Task
from prismlm.run_state import Interrupts

# Local servers want some key and ignore its value.
KEY_VARIABLE, NO_KEY = "OPENAI_API_KEY", "none"
# How to ask for a schema, in the order tried; "plain" sets no option at all.
FORMATS = ("json_schema", "json_object", "text", "plain")
# Enough for a model that reasons before it answers; one that never stops is cut off.
MAX_TOKENS = 2048
# Give up when more than half of the first 8 questions fail, or 32 in a row.
MIN_QUESTIONS, MAX_FAILURES_IN_A_ROW = 8, 32
MESSAGE_LENGTH = 300
ADVICE = {
    401: f"Set {KEY_VARIABLE} to a key that is valid there.",
    403: f"Set {KEY_VARIABLE} to a key that has access.",
    404: "Check the name of the model, and that the path ends in /v1.",
    429: "Try again later, or send fewer requests at once with --concurrency.",
}
CODE_BLOCK = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)
JSON_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    list[str]: {"type": "array", "items": {"type": "string"}},
}
# The text below each heading of the file.
PROMPTS = dict(
    re.findall(
        r"^# (\w+)\n+(.*?)\s*(?=^# |\Z)",
        (Path(__file__).parent / "prompts.md").read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
)
T = TypeVar("T")
R = TypeVar("R")


class NoAnswer(Exception):
    """A question without a usable answer: refused, timed out, or not in the format requested."""


def prompt(name: str, **values: str) -> str:
    """Fill in a prompt of ``prompts.md``."""
    return Template(PROMPTS[name]).substitute(values)


def fenced(data: str) -> str:
    """Put untrusted text between two lines made of its digest, which it cannot contain."""
    fence = "data-" + hashlib.sha256(data.encode(errors="replace")).hexdigest()[:12]
    return f"<{fence}>\n{data}\n</{fence}>"


def one_line(text: str, length: int) -> str:
    """Return untrusted text as one line of at most ``length`` characters, without control codes.

    Zero-width joiners, as in emoji and Persian, are kept.
    """
    start = text[: 8 * length]
    printable = "".join(c if c.isprintable() or c in "\u200c\u200d" else " " for c in start)
    line = " ".join(printable.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


class Question(NamedTuple):
    """A chat that asks for a JSON object."""

    messages: tuple[dict[str, str], ...]
    fields: dict[str, Any]  # of the answer: types among JSON_TYPES, or a tuple of allowed values
    is_valid: Callable[[dict[str, Any]], bool] = lambda answer: True

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer."""
        return {
            "type": "object",
            "properties": {
                name: {"type": "string", "enum": list(kind)}
                if isinstance(kind, tuple)
                else JSON_TYPES[kind]
                for name, kind in self.fields.items()
            },
            "required": list(self.fields),
            "additionalProperties": False,
        }

    def answer(self, text: object) -> dict[str, Any]:
        """Parse a reply; raise NoAnswer with the reason if it is not an answer."""
        if not isinstance(text, str):
            raise NoAnswer("there is no text in it")
        choices = {name: kind for name, kind in self.fields.items() if isinstance(kind, tuple)}
        block = CODE_BLOCK.fullmatch(text)
        try:
            answer = json.loads(block[1] if block else text)
            check_json(answer, self.fields | dict.fromkeys(choices, str), "the answer")
        except (ValueError, RecursionError, FormatError):
            answer = {}
        if answer.keys() != self.fields.keys():
            raise NoAnswer(f"it is no JSON object with the fields {', '.join(self.fields)}")
        for name, allowed in choices.items():
            # Case, spaces and punctuation do not count.
            by_letters = {_letters(choice): choice for choice in allowed}
            if _letters(answer[name]) not in by_letters:
                raise NoAnswer(f"its {name} is not one of the choices")
            answer[name] = by_letters[_letters(answer[name])]
        if not self.is_valid(answer):
            raise NoAnswer("a value in it is empty or out of range")
        return answer


def _letters(name: str) -> str:
    return re.sub(r"\W", "", name).casefold()


class Answers:
    """Answers in a file of JSON lines, by question; threads may add to it.

    A damaged line is skipped, so its question is asked again.
    """

    def __init__(self, path: Path, model: str) -> None:
        self.path, self.model, self._lock = path, model, threading.Lock()
        self._answers: dict[str, Any] = {}
        data = path.read_bytes() if path.is_file() else b""
        # Ends a truncated last line before the next one is added.
        self._separator = b"" if data.endswith(b"\n") or not data else b"\n"
        for line in data.splitlines():
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                row = json.loads(line)
                self._answers[row["key"]] = row["answer"]

    def _key(self, question: Question) -> str:
        value = json_text([self.model, question.messages, question.schema])
        return hashlib.sha256(value.encode(errors="replace")).hexdigest()

    def get(self, question: Question) -> dict[str, Any] | None:
        """Return the stored answer to a question; None if it is missing or invalid."""
        try:
            return question.answer(json_text(self._answers.get(self._key(question))))
        except NoAnswer:
            return None

    def add(self, question: Question, answer: dict[str, Any]) -> None:
        """Store an answer on disk."""
        key = self._key(question)
        line = json_text({"key": key, "answer": answer}) + "\n"
        with self._lock, room_to_write(str(self.path), self.path.parent, self.kept):
            with self.path.open("ab") as file:
                file.write(self._separator + line.encode(errors="replace"))
            self._separator = b""
            self._answers[key] = answer

    def kept(self) -> str:
        """Say where the answers are."""
        if not self.path.is_file():
            return "No answers have been saved."
        return f"The answers so far are kept in {self.path}; run the same command again to resume."


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint."""

    url: str  # before /chat/completions, such as http://localhost:8080/v1
    model: str
    concurrency: int = 8
    timeout: float = 120.0  # seconds
    retries: int = 2  # if a request times out or the endpoint is busy

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(check_text("the endpoint", self.url))
            # An invalid port raises only when it is read.
            valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            valid = False
        if not valid or "@" in self.url:
            raise InputError(
                f"the endpoint is {shown(self.url.rpartition('@')[2])}: expected a URL such as "
                f"http://localhost:8080/v1, without a password; {KEY_VARIABLE} holds a key."
            )
        check_whole("the concurrency", self.concurrency, 1, 1024)
        check_whole("the retries", self.retries)
        check_number("the timeout", self.timeout, "seconds above 0", lambda value: value > 0)


def _options(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "strict": True, "schema": schema}
    formats = {"json_schema": {"json_schema": named}, "json_object": {"schema": schema}}
    reply = {"response_format": {"type": kind, **formats[kind]}} if kind in formats else {}
    return {} if kind == "plain" else {"temperature": 0, "max_tokens": MAX_TOKENS, **reply}


class Session:
    """Questions to an endpoint."""

    def __init__(self, endpoint: Endpoint, answers: Answers) -> None:
        import openai

        self.endpoint, self.answers = endpoint, answers
        # Requests that got a reply, and their tokens where the endpoint reports these.
        self.tally: Counter[str] = Counter(requests=0, tokens_in=0, tokens_out=0)
        self.failures: Counter[str] = Counter()  # questions, by reason
        self._lock = threading.Lock()
        self._format = 0  # the first of FORMATS that the endpoint has not refused
        self._client = openai.OpenAI(
            base_url=endpoint.url,
            api_key=os.environ.get(KEY_VARIABLE) or NO_KEY,
            timeout=endpoint.timeout,
            max_retries=endpoint.retries,
        )

    def usage(self) -> dict[str, Any]:
        """Return the tally, with failures by reason."""
        return {**self.tally, "failures": dict(self.failures)}

    def ask(self, question: Question) -> dict[str, Any]:
        """Return the stored answer to a question, or ask for it, again if the reply is unusable."""
        if (stored := self.answers.get(question)) is not None:
            return stored
        messages = list(question.messages)
        text = self._reply(messages, question)
        try:
            answer = question.answer(text)
        except NoAnswer as error:
            said = {"role": "assistant", "content": str(text)[:MESSAGE_LENGTH]}
            again = {"role": "user", "content": prompt("again", reason=str(error))}
            answer = question.answer(self._reply([*messages, said, again], question))
        self.answers.add(question, answer)
        return answer

    def _reply(self, messages: list[dict[str, str]], question: Question) -> str | None:
        reply = self._request(messages, question)
        # The client does not validate what it receives.
        usage, choices = getattr(reply, "usage", None), getattr(reply, "choices", None)
        counts = [getattr(usage, name, 0) for name in ("prompt_tokens", "completion_tokens")]
        with self._lock:
            self.tally["requests"] += 1
            for name, count in zip(("tokens_in", "tokens_out"), counts, strict=True):
                self.tally[name] += count if isinstance(count, int) else 0
        first = choices[0] if isinstance(choices, list) and choices else None
        message = getattr(first, "message", None)
        if getattr(message, "refusal", None):
            raise NoAnswer("the model refused")
        return getattr(message, "content", None)

    def _request(self, messages: list[dict[str, str]], question: Question) -> object:
        """Send a request, and fall back to a simpler format for good if the endpoint refuses it."""
        import openai

        refusals = (
            openai.BadRequestError,
            openai.UnprocessableEntityError,
            openai.InternalServerError,
        )
        create: Any = self._client.chat.completions.create
        tried = self._format
        while True:
            options = _options(FORMATS[tried], question.schema)
            try:
                reply = create(model=self.endpoint.model, messages=messages, **options)
            except refusals as error:
                # A format that has worked before is not the cause.
                if (self.tally["requests"] and tried == self._format) or tried + 1 == len(FORMATS):
                    raise self._error(error) from error
                tried = max(tried + 1, self._format)
            except openai.APIError as error:
                raise self._error(error) from error
            except ValueError:  # the body is not JSON
                return None
            else:
                self._format = tried
                return reply

    def _error(self, error: Exception) -> NoAnswer | InputError:
        """Return the error of a failed request: InputError if it would stop every other as well."""
        import openai

        status = getattr(error, "status_code", None)
        reason, fatal = f"it answered with status {status}", status in (401, 403, 404)
        advice = ADVICE.get(status or 0, "Look at what the server logs about it.")
        if isinstance(error, openai.APITimeoutError):
            reason = f"it did not answer within {self.endpoint.timeout:g} seconds"
            advice = "Raise --timeout, or send fewer requests at once with --concurrency."
        elif isinstance(error, openai.APIConnectionError):
            fatal, reason = True, "it cannot be reached"
            advice = "Start the server, or check host, port and path, which usually ends in /v1."
        # Before the first reply, every failure is likely to repeat.
        if not fatal and self.tally["requests"]:
            return NoAnswer(reason)
        cause = one_line(str(error.__cause__ or error), MESSAGE_LENGTH)
        return InputError(
            f"{self.endpoint.url}: {reason} ({cause}). {advice} {self.answers.kept()}"
        )

    def _too_many(self, failed: int, count: int) -> InputError:
        reason = self.failures.most_common(1)[0][0]
        return InputError(
            f"{failed:,} of the first {count:,} questions to "
            f"{self.endpoint.model!r} at {self.endpoint.url} got no usable answer, mostly because "
            f"{reason}. Try another model, or check the server. {self.answers.kept()}"
        )

    def each(
        self, jobs: Sequence[T], work: Callable[[T], R], task: Task
    ) -> Iterator[tuple[T, R | None]]:
        """Yield each job with its result, None if it failed; InputError if most of them fail."""
        waiting = deque(jobs)
        done: SimpleQueue[tuple[T, R | None, Exception | None]] = SimpleQueue()

        def run() -> None:
            with suppress(IndexError):
                while True:
                    job = waiting.popleft()
                    try:
                        done.put((job, work(job), None))
                    except Exception as error:  # raised by the loop below
                        done.put((job, None, error))

        # Daemon threads, so that a pending request does not delay the end of the process.
        for _ in range(min(self.endpoint.concurrency, len(jobs))):
            threading.Thread(target=run, daemon=True).start()
        failed = in_a_row = 0
        try:
            with Interrupts(self.answers.kept) as signals:
                signals.now = True
                for count in range(1, len(jobs) + 1):
                    job, result, error = done.get()
                    in_a_row = 0 if error is None else in_a_row + 1
                    if error is not None:
                        if not isinstance(error, NoAnswer):
                            raise error
                        failed += 1
                        self.failures[str(error)] += 1
                        task.note(f"{failed:,} failed, the last because {error}")
                        most = 2 * failed > count and count >= min(MIN_QUESTIONS, len(jobs))
                        if most or in_a_row >= MAX_FAILURES_IN_A_ROW:
                            raise self._too_many(failed, count)
                    task.advance()
                    yield job, result
        finally:
            waiting.clear()
