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
from prismlm.labels.answers import Answers, Failed, Question, one_line, prompt
from prismlm.progress import Task
from prismlm.run_state import Interrupts

CONCURRENCY, TIMEOUT, RETRIES = 8, 120.0, 2
# Servers on one's own machine want some key, and look at none.
KEY_VARIABLE, NO_KEY = "OPENAI_API_KEY", "none"
# How an answer's schema may be told, the first that the endpoint knows.
FORMATS = ("json_schema", "json_object")
# Enough for a model that thinks aloud before it answers; one that never ends is cut off.
MOST_TOKENS = 2048
# Once more after an answer that is none.
TRIES = 2
# Give up when more than half of so many questions failed, or so many one after another.
MIN_ASKED, MOST_IN_A_ROW = 8, 32
MESSAGE_LENGTH = 300
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Endpoint:
    """Where a language model is, and how it may be asked.

    Attributes:
        url: what ``/chat/completions`` is put after, such as ``http://localhost:8080/v1``.
        model: its name there.
        concurrency: questions at once.
        timeout: seconds until a request is given up.
        retries: of a request that was given up, or that the endpoint was too busy for.

    Raises:
        InputError: no URL, or a number out of range.
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


def response_format(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the option of a request that asks for a schema, as one of ``FORMATS`` has it."""
    if kind == "json_schema":
        return {"type": kind, kind: {"name": "answer", "strict": True, "schema": schema}}
    return {"type": kind, "schema": schema}


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
        # Options of a request that were answered, with the answer's form by its kind, and those
        # that the endpoint does not know.
        self._known: set[str] = set()
        self._unknown: set[str] = set()
        self._formats = list(FORMATS)
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
        for left in reversed(range(TRIES)):
            text = self._reply(messages, question)
            try:
                answer = question.answer(text)
            except Failed as error:
                if not left:
                    raise
                said = {"role": "assistant", "content": str(text)[:MESSAGE_LENGTH]}
                again = {"role": "user", "content": prompt("again", reason=str(error))}
                messages += [said, again]
            else:
                self.answers.add(question, answer)
                return answer
        raise AssertionError

    def _reply(self, messages: list[dict[str, str]], question: Question) -> str | None:
        reply = self._request(messages, question)
        usage, choices = getattr(reply, "usage", None), getattr(reply, "choices", None)
        tokens = {"tokens_in": "prompt_tokens", "tokens_out": "completion_tokens"}
        with self._lock:
            self.tally["requests"] += 1
            for name, there in tokens.items():
                count = getattr(usage, there, None)
                # The client believes whatever it is sent.
                self.tally[name] += count if isinstance(count, int) else 0
        first = choices[0] if isinstance(choices, list) and choices else None
        message = getattr(first, "message", None)
        if getattr(message, "refusal", None):
            raise Failed("the model refused")
        return getattr(message, "content", None)

    def _request(self, messages: list[dict[str, str]], question: Question) -> object:
        """Return the reply; an option that the endpoint does not know is left out from then on."""
        import openai

        refusals = (
            openai.BadRequestError,
            openai.UnprocessableEntityError,
            openai.InternalServerError,
        )
        create: Any = self._client.chat.completions.create
        while True:
            wanted: dict[str, Any] = {"temperature": 0, "max_tokens": MOST_TOKENS}
            if kind := next(iter(self._formats), None):
                wanted["response_format"] = response_format(kind, question.schema)
            sent = {name: value for name, value in wanted.items() if name not in self._unknown}
            forms = {name: name for name in sent} | ({"response_format": kind} if kind else {})
            try:
                reply = create(model=self.endpoint.model, messages=messages, **sent)
            except refusals as error:
                named = {name for name in sent if name in str(error)}
                if not named and not isinstance(error, openai.InternalServerError):
                    # An error that names none of them is of the one that the fewest know.
                    named = {"response_format"}
                named = {name for name in named & sent.keys() if forms[name] not in self._known}
                if not named:
                    raise self._failure(error) from error
                with self._lock:
                    self._unknown |= named - {"response_format"}
                    # Another thread may have learned the same.
                    if "response_format" in named and self._formats[:1] == [kind]:
                        del self._formats[0]
            except openai.APIError as error:
                raise self._failure(error) from error
            except ValueError:
                return None
            else:
                self._known |= set(forms.values())
                return reply

    def _failure(self, error: Exception) -> Failed | InputError:
        """Return what a request that failed comes to: for its question, or for all of them."""
        import openai

        # What is wrong before anything was right will not become so.
        fatal = not self.tally["requests"]
        reason = f"it answered with status {getattr(error, 'status_code', 'unknown')}"
        way_out = "Look at what the server says of it."
        if isinstance(error, openai.APITimeoutError):
            reason = f"it did not answer within {self.endpoint.timeout:g} seconds"
            way_out = "Wait longer with --timeout, or ask less at once with --concurrency."
        elif isinstance(error, openai.APIConnectionError):
            fatal, reason = True, "it cannot be reached"
            way_out = "Start the server, or check host, port and path: mostly it ends in /v1."
        elif isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            fatal, way_out = True, f"Set {KEY_VARIABLE} to a key that is valid there."
        elif isinstance(error, openai.NotFoundError):
            fatal = True
            way_out = f"Does it serve {self.endpoint.model!r}? Does its path end in /v1?"
        elif isinstance(error, openai.RateLimitError):
            way_out = "Try again later, or ask less at once with --concurrency."
        if not fatal:
            return Failed(reason)
        said = one_line(str(error.__cause__ or error), MESSAGE_LENGTH)
        return InputError(f"{self.endpoint.url}: {reason} ({said}). {way_out} {self._kept()}")

    def _kept(self) -> str:
        return self.answers.kept() if self.answers.path.is_file() else "No answer is kept."

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
            with Interrupts(self._kept) as signals:
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
            f"Try another model, or look at the server. {self._kept()}"
        )
