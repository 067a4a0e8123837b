"""Reporting each step of a text while the model still writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from prismlm.corpus.pieces import BROKEN, MOST_JOINED, Piece, pieces_of
from prismlm.explain.prediction import OutputLayer, Recorded, fed_back, split_states
from prismlm.explain.steps import Step, steps_of
from prismlm.lens.opened_model import OpenedModel
from prismlm.ops.prototype_head.routing import inverse_norms

# Seconds from one report to the next. A state alone takes a pass over all prototypes, as several
# do together, so the next report waits REST times as long as the last one took.
SHORTEST, LONGEST, REST = 0.1, 0.3, 30
# Is called with each step, in order, once its target is whole characters; False stops the writing.
OnStep = Callable[[Step], bool | None]


class Following:
    """Splits the predictions of a generation while it is written, and reports them one by one.

    The steps are those that ``explain`` returns at the end, except for chains. Those that come
    soon after others are reported together. A model that keeps predictions of its prompt to itself
    is not followed.

    Args:
        lm: the model.
        recorded: what passes its output embedding meanwhile.
        prompt_length: tokens of the prompt.
        on_step: is called with each step.

    Attributes:
        end: once ``on_step`` has ended the writing, how many tokens there are up to the last
            reported target; the prompt and one at least.
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
        self._waiting: list[Step] = []

    def __call__(self, ids: Tensor) -> bool:
        """Report the steps up to the last of ``ids`` [1, T], if it is time; say whether to stop."""
        began = time.monotonic()
        if began < self._next:
            return False
        # The first written token does not wait for a long prompt.
        rest = REST if self._passes else 0
        stop = self._follow(ids)
        now = time.monotonic()
        self._next = now + min(max(rest * (now - began), SHORTEST), LONGEST)
        return stop

    def finish(self, ids: Tensor) -> None:
        """Report the rest of the finished ``ids``, with characters that never became whole."""
        if self.end is None and not self._follow(ids):
            for step in self._waiting:
                self._on_step(step)

    @torch.no_grad()
    def _follow(self, ids: Tensor) -> bool:
        """Split the passes that are new, and report their steps; return whether to stop."""
        lm, passes = self._lm, slice(self._passes, None)
        states = self._recorded.states[passes]
        if not states or not self._recorded.is_of(ids[:, :-1]):
            return False
        self._passes += len(states)
        z, embedded = (torch.cat(one, 1)[0] for one in (states, self._recorded.embedded[passes]))
        codes, new = self._recorded.codes[passes], ids[0, -len(z) - 1 :]
        split = split_states(self._output, lm.head, z, embedded, new[:-1], new[1:], self._inverse)
        fed = fed_back(lm.model, torch.cat(codes, 1)[0] if codes else None)
        every, pieces = ids[0].tolist(), self._pieces
        # The last tokens are read as pieces anew where they wait for the rest of a character.
        first = len(pieces)
        earliest = max(0, first - MOST_JOINED)
        while first > earliest and BROKEN in pieces[first - 1].text:
            first -= 1
        pieces[first:] = pieces_of(lm.tokenizer, every[first:])
        given = replace(split, fed_back=fed), every, self._prompt_length, lm.tokenizer, lm.lens
        steps = [*self._waiting, *steps_of(*given, pieces=pieces)]
        self._waiting = [
            replace(one, pieces=tuple(pieces[one.position : one.position + 2])) for one in steps
        ]
        return self._report()

    def _report(self) -> bool:
        while self._waiting:
            if BROKEN in self._waiting[0].pieces[1].text and len(self._waiting) < MOST_JOINED:
                return False
            step = self._waiting.pop(0)
            if self._on_step(step) is False:
                self.end = max(step.position + 1, self._prompt_length) + 1
                return True
        return False
