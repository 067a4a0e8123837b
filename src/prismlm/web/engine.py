"""The thread that writes: a bounded queue before it, and texts that are written together."""

from __future__ import annotations

import logging
import threading
from collections import deque

from torch import Tensor

from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import Recorded, record
from prismlm.web.batch import Batch, writes_together
from prismlm.web.line import Busy
from prismlm.web.writing import Writing

log = logging.getLogger("prismlm.web")


class Engine:
    """Writes what is submitted, several at a time where the model allows it.

    Args:
        lm: the model.
        together: texts that are written at the same time.
        waiting: how many more may wait.

    Attributes:
        together: texts that are written at the same time: 1 for models whose cache is of one text,
            see :func:`~prismlm.web.batch.writes_together`; ``generate`` writes these.
    """

    def __init__(self, lm: PrismLM, together: int, waiting: int) -> None:
        self._lm, self._most = lm, waiting
        self._batched = together > 1 and writes_together(lm.model)
        self.together = together if self._batched else 1
        self._queue: deque[Writing] = deque()
        self._writing: list[Writing] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="prismlm-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._queue)

    @property
    def writing(self) -> int:
        """How many texts are being written."""
        return len(self._writing)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise Busy where nothing more may wait; who has left waits no longer."""
        with self._changed:
            self._queue = deque(one for one in self._queue if not one.left)
            free = self.together - len(self._writing)
            if len(self._queue) >= self._most + max(0, free):
                raise Busy

    def submit(self, writing: Writing) -> None:
        """Let a text wait for its turn.

        Raises:
            Busy: too many wait.
        """
        self.check()
        with self._changed:
            self._queue.append(writing)
            self._changed.notify()

    def close(self) -> None:
        """End what is being written, and the thread."""
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
                else:
                    self._alone(new)
            except Exception as error:  # whatever a model raises: the others that wait are served
                log.exception("writing failed")
                for one in [*self._writing, *new]:
                    if one.finish_reason is not None:  # it had ended, and was not told so
                        one.tell(None)
                    elif not one.left:
                        one.fail(error)
                self._writing, batch = [], Batch(self._lm.model)

    def _next(self) -> list[Writing] | None:
        """Return the texts that begin now, once there is anything to do; None at the end."""
        with self._changed:
            while not (self._closing or self._queue or self._writing):
                self._changed.wait()
            if self._closing:
                return None
            new: list[Writing] = []
            while self._queue and len(self._writing) + len(new) < self.together:
                one = self._queue.popleft()
                if not one.left:
                    new.append(one)
            return new

    def _step(self, batch: Batch, new: list[Writing]) -> None:
        """Write one token of every text in the batch, and the first of those that join it."""
        rows = self._writing
        going_on = [number for number, one in enumerate(rows) if not one.over]
        batch.keep(going_on)
        rows = self._writing = [rows[number] for number in going_on]
        if rows:
            read = zip(*batch.step([one.ids[-1] for one in rows]), strict=True)
            for one, (state, embedded, logits) in zip(rows, read, strict=True):
                one.next(state[None], embedded, logits)
        for one in new:
            one.next(*batch.join(one.prompt))
            rows.append(one)
        for one in rows:
            if one.finish_reason is not None:
                one.tell(None)

    def _alone(self, new: list[Writing]) -> None:
        """Write one text to its end, as ``generate`` does."""
        for one in new:
            self._writing = [one]
            wanted = one.wanted
            with record(self._lm.model) as recorded:

                def enough(ids: Tensor, one: Writing = one, recorded: Recorded = recorded) -> bool:
                    embedded = recorded.embedded[-1][0, -1].float()
                    if not one.left:
                        one.accept(int(ids[0, -1]), self._lm.logit_map(embedded))
                    if not one.wanted.traced:
                        del recorded.embedded[:-1], recorded.states[:-1]
                    return one.over

                self._lm.write(
                    *(one.prompt, wanted.tokens, wanted.temperature, wanted.seed),
                    top_p=wanted.top_p,
                    all_logits=wanted.traced,
                    enough=enough,
                )
            one.recorded = recorded
            one.tell(None)
            self._writing = []
