"""A language model behind an OpenAI-compatible endpoint: some questions at once, and what fails."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prismlm.errors import InputError, check_number, check_text, check_whole, shown
from prismlm.lens.labels.answers import Answers, Failed, Question, one_line, prompt
from prismlm.progress import Task
from prismlm.run_state import Interrupts

CONCURRENCY, TIMEOUT, RETRIES = 8, 120.0, 2
# Servers on one's own machine want some key, and look at none.
KEY_VARIABLE, NO_KEY = "OPENAI_API_KEY", "none"
# How an answer's schema is asked for, the first that the endpoint knows; then not at all, and last
# with no option whatever.
FORMATS = ("json_schema", "json_object", "text", "plain")
# Enough for a model that thinks aloud before it answers; one that never ends is cut off.
MOST_TOKENS = 2048
# Give up when more than half of so many questions failed, or so many one after another.
MIN_ASKED, MOST_IN_A_ROW = 8, 32
MESSAGE_LENGTH = 300
# What to do about a status.
WAYS_OUT = {
    401: f"Set {KEY_VARIABLE} to a key that is valid there.",
    403: f"Set {KEY_VARIABLE} to a key that is valid there.",
    404: "Check the name of the model, and that the path ends in /v1.",
    429: "Try again later, or ask less at once with --concurrency.",
}
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Endpoint:
    """Where a language model is, and how it may be asked; InputError for what cannot be.

    Attributes:
        url: what ``/chat/completions`` is put after, such as ``http://localhost:8080/v1``.
        model: its name there.
        concurrency: questions at once.
        timeout: seconds until a request is given up.
        retries: of a request that was given up, or that the endpoint was too busy for.
    """

    url: str
    model: str
    concurrency: int = CONCURRENCY
    timeout: float = TIMEOUT
    retries: int = RETRIES

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(check_text("the endpoint", self.url))
            # An impossible port is an error only when it is asked for.
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


def request_options(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a request that asks for a schema in one of ``FORMATS``."""
    if kind == "plain":
        return {}
    options: dict[str, Any] = {"temperature": 0, "max_tokens": MOST_TOKENS}
    if kind == "json_schema":
        named = {"name": "answer", "strict": True, "schema": schema}
        options["response_format"] = {"type": kind, kind: named}
    elif kind == "json_object":
        options["response_format"] = {"type": kind, "schema": schema}
    return options


class Session:
    """Questions to an endpoint.

    Attributes:
        tally: requests that were answered, and their tokens in and out, where it counts them.
        failures: how often each thing went wrong with a question that got no answer.
    """

    def __init__(self, endpoint: Endpoint, answers: Answers) -> None:
        import openai

        self.endpoint, self.answers = endpoint, answers
        self.tally: Counter[str] = Counter(requests=0, tokens_in=0, tokens_out=0)
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        # The first of FORMATS that was not refused so far.
        self._format = 0
        self._client = openai.OpenAI(
            base_url=endpoint.url,
            api_key=os.environ.get(KEY_VARIABLE) or NO_KEY,
            timeout=endpoint.timeout,
            max_retries=endpoint.retries,
        )

    def asked(self) -> dict[str, Any]:
        """Return what asking came to: answers, tokens in and out, what went wrong how often."""
        return {**self.tally, "failures": dict(self.failures)}

    def ask(self, question: Question) -> dict[str, Any]:
        """Return the answer to a question, the one that was kept where there is one.

        Raises:
            Failed: there is none, after one more try.
            InputError: there can be none to any: nobody is there, or lets nobody in.
        """
        if (known := self.answers.get(question)) is not None:
            return known
        messages = list(question.messages)
        text = self._reply(messages, question)
        try:
            answer = question.answer(text)
        except Failed as error:
            said = {"role": "assistant", "content": str(text)[:MESSAGE_LENGTH]}
            again = {"role": "user", "content": prompt("again", reason=str(error))}
            answer = question.answer(self._reply([*messages, said, again], question))
        self.answers.add(question, answer)
        return answer

    def _reply(self, messages: list[dict[str, str]], question: Question) -> str | None:
        reply = self._request(messages, question)
        usage, choices = getattr(reply, "usage", None), getattr(reply, "choices", None)
        # The client believes whatever it is sent.
        counts = [getattr(usage, name, 0) for name in ("prompt_tokens", "completion_tokens")]
        with self._lock:
            self.tally["requests"] += 1
            for name, count in zip(("tokens_in", "tokens_out"), counts, strict=True):
                self.tally[name] += count if isinstance(count, int) else 0
        first = choices[0] if isinstance(choices, list) and choices else None
        message = getattr(first, "message", None)
        if getattr(message, "refusal", None):
            raise Failed("the model refused")
        return getattr(message, "content", None)

    def _request(self, messages: list[dict[str, str]], question: Question) -> object:
        """Return the reply; what the endpoint refuses to be asked with is left out from then on."""
        import openai

        refusals = (
            openai.BadRequestError,
            openai.UnprocessableEntityError,
            openai.InternalServerError,
        )
        create: Any = self._client.chat.completions.create
        tried = self._format
        while True:
            options = request_options(FORMATS[tried], question.schema)
            try:
                reply = create(model=self.endpoint.model, messages=messages, **options)
            except refusals as error:
                # What has been answered once is not the reason.
                if (self.tally["requests"] and tried == self._format) or tried + 1 == len(FORMATS):
                    raise self._failure(error) from error
                tried = max(tried + 1, self._format)
            except openai.APIError as error:
                raise self._failure(error) from error
            except ValueError:  # no JSON
                return None
            else:
                self._format = tried
                return reply

    def _failure(self, error: Exception) -> Failed | InputError:
        """Return what a request that failed comes to: for its question, or for all of them."""
        import openai

        status = getattr(error, "status_code", None)
        reason, fatal = f"it answered with status {status}", status in (401, 403, 404)
        way_out = WAYS_OUT.get(status or 0, "Look at what the server says of it.")
        if isinstance(error, openai.APITimeoutError):
            reason = f"it did not answer within {self.endpoint.timeout:g} seconds"
            way_out = "Wait longer with --timeout, or ask less at once with --concurrency."
        elif isinstance(error, openai.APIConnectionError):
            fatal, reason = True, "it cannot be reached"
            way_out = "Start the server, or check host, port and path: mostly it ends in /v1."
        # What is wrong before anything was right will not become so.
        if not fatal and self.tally["requests"]:
            return Failed(reason)
        said = one_line(str(error.__cause__ or error), MESSAGE_LENGTH)
        return InputError(
            f"{self.endpoint.url}: {reason} ({said}). {way_out} {self.answers.kept()}"
        )

    def each(
        self, jobs: Sequence[T], work: Callable[[T], R], task: Task
    ) -> Iterator[tuple[T, R | None]]:
        """Yield each job with what its work came to, as they come; None where it failed.

        Raises:
            InputError: more than half of them fail, or none can succeed.
            Interrupted: a signal came.
        """
        left = deque(jobs)
        done: SimpleQueue[tuple[T, R | None, Exception | None]] = SimpleQueue()

        def run() -> None:
            with suppress(IndexError):
                while True:
                    job = left.popleft()
                    try:
                        done.put((job, work(job), None))
                    except Exception as error:  # looked at by whoever waits
                        done.put((job, None, error))

        # Daemons: a request under way does not keep a process that was told to end.
        for _ in range(min(self.endpoint.concurrency, len(jobs))):
            threading.Thread(target=run, daemon=True).start()
        failed = in_a_row = 0
        try:
            with Interrupts(self.answers.kept) as signals:
                signals.now = True
                for count in range(1, len(jobs) + 1):
                    job, found, error = done.get()
                    if error is not None and not isinstance(error, Failed):
                        raise error
                    in_a_row = 0 if error is None else in_a_row + 1
                    if error is not None:
                        failed += 1
                        self.failures[str(error)] += 1
                        task.note(f"{failed:,} failed, the last since {error}")
                        most = 2 * failed > count and count >= min(MIN_ASKED, len(jobs))
                        if most or in_a_row >= MOST_IN_A_ROW:
                            raise self._abort(failed, count)
                    task.advance()
                    yield job, found
        finally:
            left.clear()

    def _abort(self, failed: int, count: int) -> InputError:
        reason = self.failures.most_common(1)[0][0]
        return InputError(
            f"{failed:,} of the first {count:,} questions to {self.endpoint.model!r} at "
            f"{self.endpoint.url} got no answer that can be used, mostly since {reason}. "
            f"Try another model, or look at the server. {self.answers.kept()}"
        )
