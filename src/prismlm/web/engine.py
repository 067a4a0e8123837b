"""The thread that generates, and the bounded queues in front of the model."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from torch import Tensor, nn

from prismlm.explain.language_model import PrismLM
from prismlm.models.seam import output_embedding
from prismlm.models.uncertainty_feedback import recording_codes
from prismlm.models.watch import Hook, watch
from prismlm.web.batch import Batch, supports_batching
from prismlm.web.generation import Generation

T = TypeVar("T")
log = logging.getLogger("prismlm.web")


class Busy(Exception):
    """Too many requests are waiting for the model."""


class RequestQueue:
    """Runs calls one at a time, in order of arrival; at most ``max_waiting`` may wait."""

    def __init__(self, max_waiting: int) -> None:
        self._turn, self._max_waiting = CapacityLimiter(1), max_waiting

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return self._turn.statistics().tasks_waiting

    def check(self) -> None:
        """Raise Busy if the queue is full."""
        if self.waiting >= self._max_waiting:
            raise Busy

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, run in a thread when its turn comes, or raise Busy.

        Cancelled by an anyio scope, it returns when the thread has ended.
        """
        self.check()
        return await to_thread.run_sync(call, limiter=self._turn)


class Engine:
    """Generates submitted texts, up to ``batch_size`` at a time; ``max_waiting`` more may wait.

    Models that :func:`~prismlm.web.batch.supports_batching` excludes write one at a time, by
    their ``generate``.
    """

    def __init__(self, lm: PrismLM, batch_size: int, max_waiting: int) -> None:
        self._lm, self._max_waiting = lm, max_waiting
        self._batched = batch_size > 1 and supports_batching(lm.model)
        self.batch_size = batch_size if self._batched else 1
        self._queue: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="prismlm-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many texts are being generated."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise Busy if the queue is full; abandoned requests leave it."""
        with self._changed:
            self._queue = deque(waiting for waiting in self._queue if not waiting.abandoned)
            free = self.batch_size - len(self._running)
            if len(self._queue) >= self._max_waiting + max(0, free):
                raise Busy

    def submit(self, generation: Generation) -> None:
        """Queue a text, or raise Busy."""
        self.check()
        with self._changed:
            self._queue.append(generation)
            self._changed.notify()

    def close(self) -> None:
        """End the thread, and whatever it generates."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        batch = Batch(self._lm.model)
        while (new := self._next()) is not None:
            try:
                if self._batched:
                    self._step(batch, new)
                elif new:
                    self._generate(new[0])
            except Exception as error:  # whatever a model raises: waiting requests are still served
                log.exception("generation failed")
                for generation in [*self._running, *new]:
                    if generation.finish_reason is not None:  # it had finished before the error
                        generation.send(None)
                    elif not generation.abandoned:
                        generation.fail(error)
                self._running, batch = [], Batch(self._lm.model)

    def _next(self) -> list[Generation] | None:
        """Wait for work; return the texts that start now, None on closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue or self._running)
            if self._closing:
                return None
            new: list[Generation] = []
            while self._queue and len(self._running) + len(new) < self.batch_size:
                generation = self._queue.popleft()
                if not generation.abandoned:
                    new.append(generation)
            return new

    def _step(self, batch: Batch, new: list[Generation]) -> None:
        """Generate one token of every text in the batch, and the first of those that join it."""
        rows = [number for number, row in enumerate(self._running) if not row.finished]
        batch.keep(rows)
        running = self._running = [self._running[number] for number in rows]
        if running:
            outputs = zip(*batch.step([row.ids[-1] for row in running]), strict=True)
            for generation, (state, embedded, logits) in zip(running, outputs, strict=True):
                generation.sample(state[None], embedded, logits)
        for generation in new:
            generation.sample(*batch.join(generation.prompt))
            running.append(generation)
        for generation in running:
            if generation.finish_reason is not None:
                generation.send(None)

    def _generate(self, generation: Generation) -> None:
        """Generate one text to its end by the model's ``generate``."""
        self._running = [generation]
        sampling = generation.sampling
        model, last = self._lm.model, list[Tensor]()

        def note(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            last[:] = [output[0, -1].float()]

        hook = Hook(output_embedding(model), after=note)
        with recording_codes(model) as generation.codes, watch([hook]):

            def enough(ids: Tensor) -> bool:
                if not generation.abandoned:
                    generation.accept(int(ids[0, -1]), self._lm.logit_map(last[0]))
                return generation.finished

            self._lm.write(
                *(generation.prompt, sampling.max_tokens, sampling.temperature, sampling.seed),
                top_p=sampling.top_p,
                enough=enough,
            )
        generation.send(None)
        self._running = []
