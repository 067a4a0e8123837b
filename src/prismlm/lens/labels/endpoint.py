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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from string import Template
from typing import Any, NamedTuple, TypeVar

from prismlm.errors import FormatError, InputError, check_number, check_text, check_whole, shown
from prismlm.files import check_json, json_text, room_to_write
from prismlm.progress import Task
from prismlm.run_state import Interrupts

# Local servers want some key and ignore its value.
KEY_VARIABLE, NO_KEY = "OPENAI_API_KEY", "none"
URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/[^@\s]*)?")
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

    @classmethod
    def about(
        cls,
        name: str,
        rows: Sequence[Mapping[str, Any]],
        fields: dict[str, Any],
        is_valid: Callable[[dict[str, Any]], bool],
    ) -> Question:
        """Return the question of a prompt about untrusted data, a row a line."""
        data = fenced("\n".join(map(json_text, rows)))
        # Not a system message, which some chat templates refuse.
        content = f"{prompt('system')}\n\n{prompt(name, data=data)}"
        return cls(({"role": "user", "content": content},), fields, is_valid)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of an answer."""
        choices = {"type": "string"}
        properties = {
            name: choices | {"enum": list(kind)} if isinstance(kind, tuple) else JSON_TYPES[kind]
            for name, kind in self.fields.items()
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return schema | {"additionalProperties": False}

    def answer(self, text: object) -> dict[str, Any]:
        """Parse a reply; raise NoAnswer with the reason if it is not an answer."""
        if not isinstance(text, str):
            raise NoAnswer("there is no text in it")
        kinds = {n: str if isinstance(kind, tuple) else kind for n, kind in self.fields.items()}
        block = CODE_BLOCK.fullmatch(text)
        try:
            answer = json.loads(block[1] if block else text)
            check_json(answer, kinds, "the answer")
        except (ValueError, RecursionError, FormatError):
            answer = {}
        if answer.keys() != kinds.keys():
            raise NoAnswer(f"it is no JSON object with the fields {', '.join(kinds)}")
        for name, kind in self.fields.items():
            if isinstance(kind, tuple) and answer[name] not in kind:
                raise NoAnswer(f"its {name} is not one of the choices")
        if not self.is_valid(answer):
            raise NoAnswer("a value in it is empty or out of range")
        return answer


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint."""

    url: str  # before /chat/completions, such as http://localhost:8080/v1
    model: str
    concurrency: int = 8
    timeout: float = 120.0  # seconds
    retries: int = 2  # if a request times out or the endpoint is busy

    def __post_init__(self) -> None:
        if not URL.fullmatch(check_text("the endpoint", self.url)):
            raise InputError(
                f"the endpoint is {shown(self.url.rpartition('@')[2])}: expected a URL such as "
                f"http://localhost:8080/v1, without a password; {KEY_VARIABLE} holds a key."
            )
        check_whole("the concurrency", self.concurrency, 1, 1024)
        check_whole("the retries", self.retries)
        check_number("the timeout", self.timeout, "seconds above 0", lambda value: value > 0)


class Session:
    """Questions to an endpoint; answers are kept in a file of JSON lines, which threads may add to.

    A damaged line is skipped, so its question is asked again.
    """

    def __init__(self, endpoint: Endpoint, path: Path) -> None:
        import openai

        self.endpoint, self.path = endpoint, path
        # Requests that got a reply, and their tokens where the endpoint reports these.
        self.tally: Counter[str] = Counter(requests=0, tokens_in=0, tokens_out=0)
        self.failures: Counter[str] = Counter()  # questions, by reason
        self._lock = threading.Lock()
        self._way = 0  # the first of the options that the endpoint has not refused
        self._client = openai.OpenAI(
            base_url=endpoint.url,
            api_key=os.environ.get(KEY_VARIABLE) or NO_KEY,
            timeout=endpoint.timeout,
            max_retries=endpoint.retries,
        )
        self._answers: dict[str, Any] = {}
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with suppress(ValueError, RecursionError, TypeError, KeyError):
                row = json.loads(line)
                self._answers[row["key"]] = row["answer"]

    def usage(self) -> dict[str, Any]:
        """Return the tally, with failures by reason."""
        return {**self.tally, "failures": dict(self.failures)}

    def kept(self) -> str:
        """Say where the answers are."""
        if not self.path.is_file():
            return "No answers have been saved."
        return f"The answers so far are kept in {self.path}; run the same command again to resume."

    def _key(self, question: Question) -> str:
        value = json_text([self.endpoint.model, question.messages, question.schema])
        return hashlib.sha256(value.encode(errors="replace")).hexdigest()

    def stored(self, question: Question) -> dict[str, Any] | None:
        """Return the stored answer to a question; None if it is missing or invalid."""
        with suppress(NoAnswer):
            return question.answer(json_text(self._answers.get(self._key(question))))
        return None

    def ask(self, question: Question) -> dict[str, Any]:
        """Return the stored answer to a question, or ask for it, again if the reply is unusable."""
        if (stored := self.stored(question)) is not None:
            return stored
        messages = list(question.messages)
        text = self._reply(messages, question)
        try:
            answer = question.answer(text)
        except NoAnswer as error:
            said = {"role": "assistant", "content": str(text)[:MESSAGE_LENGTH]}
            again = {"role": "user", "content": prompt("again", reason=str(error))}
            answer = question.answer(self._reply([*messages, said, again], question))
        # The line break comes first, as the last line may have been cut off.
        key = self._key(question)
        line = "\n" + json_text({"key": key, "answer": answer})
        with self._lock, room_to_write(str(self.path), self.path.parent, self.kept):
            with self.path.open("ab") as file:
                file.write(line.encode(errors="replace"))
            self._answers[key] = answer
        return answer

    def _reply(self, messages: list[dict[str, str]], question: Question) -> str | None:
        """Return a reply's text; fall back to simpler options for good if they are refused."""
        import openai

        refusals = openai.BadRequestError, openai.UnprocessableEntityError
        named = {"name": "answer", "strict": True, "schema": question.schema}
        limits: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
        ways: list[dict[str, Any]] = [
            limits | {"response_format": {"type": "json_schema", "json_schema": named}},
            limits | {"response_format": {"type": "json_object", "schema": question.schema}},
            limits,
            {},
        ]
        create: Any = self._client.chat.completions.create
        reply = None
        for way in range(self._way, len(ways)):
            try:
                reply = create(model=self.endpoint.model, messages=messages, **ways[way])
                self._way = way
            except (*refusals, openai.InternalServerError) as error:
                # Options that have worked before are not the cause.
                if (self.tally["requests"] and way == self._way) or way + 1 == len(ways):
                    raise self._error(error) from error
                continue
            except openai.APIError as error:
                raise self._error(error) from error
            except ValueError:  # the body is not JSON
                pass
            break
        # The client does not validate what it receives.
        usage, choices = getattr(reply, "usage", None), getattr(reply, "choices", None)
        counts = [getattr(usage, name, 0) for name in ("prompt_tokens", "completion_tokens")]
        with self._lock:
            self.tally["requests"] += 1
            for name, count in zip(("tokens_in", "tokens_out"), counts, strict=True):
                self.tally[name] += count if isinstance(count, int) else 0
        first = choices[0] if isinstance(choices, list) and choices else None
        return getattr(getattr(first, "message", None), "content", None)

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
        return InputError(f"{self.endpoint.url}: {reason} ({cause}). {advice} {self.kept()}")

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
            with Interrupts(self.kept) as signals:
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
                            raise InputError(
                                f"{failed:,} of the first {count:,} questions to "
                                f"{self.endpoint.model!r} at {self.endpoint.url} got no usable "
                                f"answer, mostly because {self.failures.most_common(1)[0][0]}. Try "
                                f"another model, or check the server. {self.kept()}"
                            )
                    task.advance()
                    yield job, result
        finally:
            waiting.clear()
