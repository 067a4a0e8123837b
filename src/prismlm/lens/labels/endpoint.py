"""Questions to a language model behind an OpenAI-compatible endpoint, and the answers on disk.

Replies are untrusted: an answer has exactly the fields that the question names, or it is rejected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, TypeVar

from prismlm.errors import FormatError, InputError, check_number, check_whole, shown
from prismlm.files import check_json, json_text
from prismlm.progress import Task
from prismlm.run_state import keeping

# Local servers want some key and ignore its value.
KEY_VARIABLE, NO_KEY = "OPENAI_API_KEY", "none"
URL = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[\w.-]+)(:\d{1,5})?(/[^@\s]*)?")
# Enough for a model that reasons before it answers; one that never stops is cut off.
MAX_TOKENS = 2048
# Give up when more than half of the first 8 questions fail, or 32 in a row.
MIN_QUESTIONS, MAX_FAILURES_IN_A_ROW = 8, 32
MESSAGE_LENGTH, SOURCE_LENGTH = 300, 48
ADVICE = (
    "Check that the server runs and what it logs, the URL, which usually ends in /v1, the model's "
    f"name, and the key in {KEY_VARIABLE}; if it is slow or busy, raise --timeout or lower "
    "--concurrency."
)
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
    fence = "data-" + hashlib.sha256(data.encode()).hexdigest()[:12]
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

    def answer(self, text: str | None) -> dict[str, Any]:
        """Parse a reply; raise NoAnswer with the reason if it is not an answer."""
        kinds = {n: str if isinstance(kind, tuple) else kind for n, kind in self.fields.items()}
        block = CODE_BLOCK.fullmatch(text or "")
        try:
            answer = json.loads(block[1] if block else text or "")
            check_json(answer, kinds, "the answer")
        except (ValueError, RecursionError, FormatError) as error:
            raise NoAnswer(f"it is no JSON object with {', '.join(kinds)}") from error
        answer = {name: answer[name] for name in kinds}
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
        if not URL.fullmatch(self.url):
            raise InputError(
                f"the endpoint is {shown(self.url.rpartition('@')[2])}: expected a URL such as "
                f"http://localhost:8080/v1, without a password; {KEY_VARIABLE} holds a key."
            )
        check_whole("the concurrency", self.concurrency, 1, 1024)
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
        self._plain = False  # the endpoint has refused a schema or a limit
        self._client = openai.OpenAI(
            base_url=endpoint.url,
            api_key=os.environ.get(KEY_VARIABLE) or NO_KEY,
            timeout=endpoint.timeout,
            max_retries=endpoint.retries,
        )
        self._answers: dict[str, Any] = {}
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with suppress(ValueError, TypeError, KeyError):
                row = json.loads(line)
                self._answers[row["key"]] = row["answer"]

    @property
    def source(self) -> str:
        """What results name as the source of the answers."""
        return f"endpoint:{one_line(self.endpoint.model, SOURCE_LENGTH)}"

    def usage(self) -> dict[str, Any]:
        """Return the tally, with failures by reason."""
        return {**self.tally, "failures": dict(self.failures)}

    def kept(self) -> str:
        """Say where the answers are."""
        return f"The answers so far are kept in {self.path}."

    def _key(self, question: Question) -> str:
        value = json_text([self.endpoint.model, question.messages, question.schema])
        return hashlib.sha256(value.encode()).hexdigest()

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
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            self._answers[key] = answer
        return answer

    def _reply(self, messages: list[dict[str, str]], question: Question) -> str | None:
        """Return a reply's text; if the first is refused, ask without a schema from then on."""
        import openai

        schema = {"name": "answer", "strict": True, "schema": question.schema}
        options: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        chat: Any = self._client.chat.completions
        create = partial(chat.create, model=self.endpoint.model, messages=messages)
        refusals = openai.BadRequestError, openai.UnprocessableEntityError
        try:
            try:
                reply = create(**({} if self._plain else options))
            except (*refusals, openai.InternalServerError):
                # Options that have worked before are not the cause.
                if self.tally["requests"] and not self._plain:
                    raise
                reply = create()
                self._plain = True
        except openai.APIError as error:
            raise self._error(error) from error
        try:
            usage, text = reply.usage, reply.choices[0].message.content
        except (AttributeError, LookupError, TypeError) as error:  # the client does not check it
            raise NoAnswer("it is no chat completion") from error
        with self._lock:
            self.tally["requests"] += 1
            self.tally["tokens_in"] += getattr(usage, "prompt_tokens", None) or 0
            self.tally["tokens_out"] += getattr(usage, "completion_tokens", None) or 0
        return text

    def _error(self, error: Exception) -> NoAnswer | InputError:
        """Return the error of a failed request: InputError if it would stop every other as well."""
        import openai

        status = getattr(error, "status_code", None)
        timed_out = isinstance(error, openai.APITimeoutError)
        unreachable = isinstance(error, openai.APIConnectionError) and not timed_out
        reason = "it cannot be reached" if unreachable else "it did not answer in time"
        reason = reason if status is None else f"it answered with status {status}"
        # Before the first reply, every failure is likely to repeat.
        if self.tally["requests"] and not unreachable and status not in (401, 403, 404):
            return NoAnswer(reason)
        cause = one_line(str(error.__cause__ or error), MESSAGE_LENGTH)
        return InputError(f"{self.endpoint.url}: {reason} ({cause}). {ADVICE} {self.kept()}")

    def answers(self, questions: Sequence[Question], task: Task) -> list[dict[str, Any] | None]:
        """Return the answer to each question, None where there is no valid one."""
        return self.each(questions, self.ask, task)

    def each(self, jobs: Sequence[T], work: Callable[[T], R], task: Task) -> list[R | None]:
        """Return the result of each job, None if it failed; InputError if most of them fail."""
        pool, failed, in_a_row = ThreadPoolExecutor(self.endpoint.concurrency), 0, 0
        numbers = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        results: list[R | None] = [None] * len(jobs)
        try:
            with keeping(self.kept):
                for count, future in enumerate(as_completed(numbers), 1):
                    try:
                        results[numbers[future]], in_a_row = future.result(), 0
                    except NoAnswer as error:
                        failed, in_a_row = failed + 1, in_a_row + 1
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
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return results
