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
    from prismlm.index.opened_model import OpenedModel

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
        self._passes = 0
        self._next = 0.0
        self._pieces: list[Piece] = []
        self._held: list[Step] = []

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> bool:
        """Tell the steps up to the last of ``ids`` [1, T], if it is time; say whether to stop."""
        began = time.monotonic()
        if began < self._next:
            return False
        of_prompt = self._passes == 0
        stop = self._follow(ids)
        now = time.monotonic()
        # The first written token waits no longer for a long prompt.
        rest = 0.0 if of_prompt else REST * (now - began)
        self._next = now + min(max(rest, SHORTEST), LONGEST)
        return stop

    def _follow(self, ids: Tensor) -> bool:
        new = self._recorded.states[self._passes :]
        if not new or not self._recorded.is_of(ids[:, :-1]):
            return False
        count = sum(z.shape[1] for z in new)
        codes = self._recorded.codes[self._passes :]
        split = split_states(
            self._output,
            self._lm.head,
            torch.cat(new, 1)[0],
            torch.cat(self._recorded.embedded[self._passes :], 1)[0],
            (ids[0, -count - 1 : -1], ids[0, -count:]),
            self._inverse,
        )
        uncertainty = fed_back(self._lm.model, torch.cat(codes, 1)[0] if codes else None)
        self._passes += len(new)
        tokens = ids[0].tolist()
        self._read(tokens)
        lm = self._lm
        steps = steps_of(
            split._replace(uncertainty=uncertainty),
            tokens,
            self._prompt_length,
            lm.tokenizer,
            lm.lens,
            pieces=self._pieces,
        )
        self._held = [self._whole(step) for step in self._held] + list(steps)
        return self._tell()

    @torch.no_grad()
    def finish(self, ids: Tensor) -> None:
        """Tell the rest of the finished ``ids``, with characters that never became whole."""
        if self.end is not None or self._follow(ids):
            return
        for step in self._held:
            self._on_step(step)
        self._held = []

    def _read(self, tokens: list[int]) -> None:
        """Read the last tokens as pieces; those that wait for the rest of a character anew."""
        first = len(self._pieces)
        earliest = max(0, first - MOST_JOINED)
        while first > earliest and BROKEN in self._pieces[first - 1].text:
            first -= 1
        self._pieces[first:] = pieces_of(self._lm.tokenizer, tokens[first:])

    def _whole(self, step: Step) -> Step:
        read = self._pieces
        return replace(step, pieces=(read[step.position], read[step.position + 1]))

    def _tell(self) -> bool:
        stop = False
        while self._held and not stop:
            target = self._held[0].pieces[1]
            if BROKEN in target.text and len(self._held) < MOST_JOINED:
                return False
            step = self._held.pop(0)
            stop = self._on_step(step) is False
            if stop:
                self.end = max(step.position + 1, self._prompt_length) + 1
        return stop
