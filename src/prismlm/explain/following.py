"""Telling each step of a text while the model still writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prismlm.corpus.pieces import BROKEN, MOST_JOINED, Piece, pieces_of
from prismlm.explain.prediction import OutputLayer, Recorded, fed_back, split_states
from prismlm.explain.steps import Step, steps_of
from prismlm.ops.prototype_head.routing import inverse_norms

if TYPE_CHECKING:
    from prismlm.lens.opened_model import OpenedModel

# Seconds from one telling to the next. A state alone takes a pass over all prototypes, as several
# do together, so the telling waits REST times as long as it took: it is a small part of the time.
SHORTEST, LONGEST, REST = 0.1, 0.3, 30
# Is called with each step, in order, once its target is whole characters; False stops the writing.
OnStep = Callable[[Step], bool | None]


class Following:
    """Splits the predictions of a generation while it goes on, and tells them one by one.

    The steps are those that ``explain`` returns at the end, but for chains. Those that come soon
    after others wait and are told together. A model that keeps predictions of its prompt to itself
    is not followed.

    Args:
        lm: the model.
        recorded: what passes its output embedding meanwhile.
        prompt_length: tokens of the prompt.
        on_step: is told.

    Attributes:
        end: how many tokens there are up to the last target told, once ``on_step`` has ended the
            writing; the prompt and one at least.
    """

    end: int | None = None

    def __init__(
        self, lm: OpenedModel, recorded: Recorded, prompt_length: int, on_step: OnStep
    ) -> None:
        self._lm, self._recorded, self._prompt_length = lm, recorded, prompt_length
        self._on_step = on_step
        self._output = OutputLayer.of(lm.model, lm.logit_map)
        self._inverse = inverse_norms(lm.head.prototypes.detach().float())
        self._passes, self._next = 0, 0.0
        self._pieces: list[Piece] = []
        self._held: list[Step] = []

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> bool:
        """Tell the steps up to the last of ``ids`` [1, T], if it is time; say whether to stop."""
        began = time.monotonic()
        if began < self._next:
            return False
        # The first written token waits no longer for a long prompt.
        rest = REST if self._passes else 0
        stop = self._follow(ids)
        now = time.monotonic()
        self._next = now + min(max(rest * (now - began), SHORTEST), LONGEST)
        return stop

    @torch.no_grad()
    def finish(self, ids: Tensor) -> None:
        """Tell the rest of the finished ``ids``, with characters that never became whole."""
        if self.end is not None or self._follow(ids):
            return
        for step in self._held:
            self._on_step(step)
        self._held = []

    def _follow(self, ids: Tensor) -> bool:
        """Split the passes that are new, and tell their steps; return whether to stop."""
        lm, passes = self._lm, slice(self._passes, None)
        states = self._recorded.states[passes]
        if not states or not self._recorded.is_of(ids[:, :-1]):
            return False
        self._passes += len(states)
        z, embedded = (torch.cat(one, 1)[0] for one in (states, self._recorded.embedded[passes]))
        codes = self._recorded.codes[passes]
        tokens = ids[0, -len(z) - 1 : -1], ids[0, -len(z) :]
        split = split_states(self._output, lm.head, z, embedded, tokens, self._inverse)
        split = split._replace(
            uncertainty=fed_back(lm.model, torch.cat(codes, 1)[0] if codes else None)
        )
        every = ids[0].tolist()
        self._read(every)
        more = steps_of(
            split, every, self._prompt_length, lm.tokenizer, lm.lens, pieces=self._pieces
        )
        # Characters of those that wait may have become whole.
        self._held = [*self._held, *more]
        self._held = [
            replace(one, pieces=tuple(self._pieces[one.position : one.position + 2]))
            for one in self._held
        ]
        return self._tell()

    def _read(self, tokens: list[int]) -> None:
        """Read the last tokens as pieces; those that wait for the rest of a character anew."""
        first = len(self._pieces)
        earliest = max(0, first - MOST_JOINED)
        while first > earliest and BROKEN in self._pieces[first - 1].text:
            first -= 1
        self._pieces[first:] = pieces_of(self._lm.tokenizer, tokens[first:])

    def _tell(self) -> bool:
        while self._held:
            if BROKEN in self._held[0].pieces[1].text and len(self._held) < MOST_JOINED:
                return False
            step = self._held.pop(0)
            if self._on_step(step) is False:
                self.end = max(step.position + 1, self._prompt_length) + 1
                return True
        return False
