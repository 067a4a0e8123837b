"""What uncertainty feedback holds while a call runs, apart for every thread."""

from __future__ import annotations

import threading
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from prismlm.models.uncertainty_feedback.call import Call
from prismlm.models.uncertainty_feedback.continued import Earlier


class State:
    """What is known of a thread's call, and of the one before.

    Attributes:
        codes: what is to be added to the input of the decoder; None outside a call.
        call: what the call says.
        replayed: whether the codes were given.
        pending: the embeddings that are called next are those of the decoder's input.
        added: whether something was added yet.
        goes_on: whether calls without a cache go on from one another.
        earlier: the last of these calls.
    """

    def __init__(self) -> None:
        self.codes: Int64[Tensor, "B T"] | None = None
        self.call: Call | None = None
        self.replayed = self.pending = self.added = self.goes_on = False
        self.earlier: Earlier | None = None

    def end_call(self) -> None:
        """Forget a call, however it ended."""
        self.codes = self.call = None
        self.replayed = self.pending = self.added = False


class Threads(threading.local):
    """One state a thread: several may call a model at once.

    The state is an object of its own because what a compiled graph writes into threading.local
    itself is lost.
    """

    def __init__(self) -> None:
        self.state = State()

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model begins with nothing; threading.local itself cannot be copied.
        return Threads, ()
