"""What generates, its batch of texts, and the bounded queues in front of the model."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from anyio import CapacityLimiter, to_thread
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from prismlm.errors import no_panics
from prismlm.explain.language_model import PrismLM
from prismlm.explain.prediction import tolerance_of
from prismlm.models.seam import output_embedding
from prismlm.models.uncertainty_feedback import recording_codes, uncertainty_of
from prismlm.models.watch import Hook, watch
from prismlm.web.generation import Generation

T = TypeVar("T")
Read = tuple[Tensor, Tensor, Tensor]
log = logging.getLogger("prismlm.web")
# Tokens by which a full cache grows.
SPARE_TOKENS = 64
# Tokens of prompts after which no more join in one step: the texts being written wait meanwhile.
JOINING_TOKENS = 256


class Busy(Exception):
    """Too many requests are waiting for the model."""


class RequestQueue:
    """Runs calls one at a time, in order of arrival; at most ``max_waiting`` may wait."""

    def __init__(self, max_waiting: int) -> None:
        self._turn, self._max_waiting = CapacityLimiter(1), max_waiting
        self._calls = 0  # that run or wait; the limiter does not yet know of those just begun

    @property
    def waiting(self) -> int:
        """How many calls wait."""
        return max(0, self._calls - 1)

    def check(self) -> None:
        """Raise Busy if the queue is full."""
        if self.waiting >= self._max_waiting:
            raise Busy

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``, run in a thread when its turn comes, or raise Busy.

        Cancelled by an anyio scope, it returns when the thread has ended.
        """
        self.check()
        self._calls += 1
        try:
            return await to_thread.run_sync(call, limiter=self._turn)
        finally:
            self._calls -= 1


class Engine:
    """Generates submitted texts, up to ``batch_size`` at a time; ``max_waiting`` more may wait.

    Texts join and leave in the event loop; the model runs in a thread of its own. Models that
    :func:`supports_batching` excludes write one text at a time, by their ``generate``.
    """

    def __init__(self, lm: PrismLM, batch_size: int, max_waiting: int) -> None:
        self._lm, self._max_waiting = lm, max_waiting
        self._batched = batch_size > 1 and supports_batching(lm.model)
        self.batch_size = batch_size if self._batched else 1
        self._queue: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "prismlm-engine")

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many texts are being generated."""
        return sum(not text.finished for text in self._running)

    def check(self) -> None:
        """Raise Busy if the queue is full; abandoned requests leave it."""
        self._queue = deque(waiting for waiting in self._queue if not waiting.abandoned)
        if len(self._queue) >= self._max_waiting + self.batch_size - self.running:
            raise Busy

    def submit(self, generation: Generation) -> None:
        """Queue a text, or raise Busy."""
        self.check()
        self._queue.append(generation)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End whatever is generated after its next token."""
        for generation in (*self._queue, *self._running):
            generation.abandoned = True
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        self._thread.shutdown()

    async def _run(self) -> None:
        """Generate until no text is left."""
        batch, run = Batch(self._lm.model), asyncio.get_running_loop().run_in_executor
        while True:
            rows = [number for number, row in enumerate(self._running) if not row.finished]
            self._running = [self._running[number] for number in rows]
            tokens = 0
            while self._queue and len(self._running) < self.batch_size and tokens < JOINING_TOKENS:
                if not (generation := self._queue.popleft()).abandoned:
                    self._running.append(generation)
                    tokens += generation.prompt.shape[1]
            if not self._running:
                return
            try:
                await run(self._thread, self._write, batch, rows, self._running)
            except Exception as error:  # whatever a model raises: waiting requests are still served
                log.exception("generation failed")
                for generation in self._running:
                    generation.fail(error)
                self._running, batch = [], Batch(self._lm.model)

    def _write(self, batch: Batch, rows: list[int], running: list[Generation]) -> None:
        """Generate until a text ends, or until another may join."""
        with no_panics():
            if not self._batched:
                self._generate(running[0])
                return
            self._step(batch, rows, running)
            # Back to the event loop at every token would cost up to a fifth of the speed.
            while not any(row.finished for row in running) and (
                not self._queue or len(running) == self.batch_size
            ):
                self._step(batch, [*range(len(running))], running)

    def _step(self, batch: Batch, rows: list[int], running: list[Generation]) -> None:
        """Generate a token of every text: of ``rows`` of the batch, and of those that join it."""
        batch.keep(rows)
        old, new = running[: len(rows)], running[len(rows) :]
        read = batch.step([row.ids[-1] for row in old]) if old else []
        joined = (batch.join(row.prompt) for row in new)  # after what is read of the old is sent
        for generation, output in zip(running, chain(read, joined), strict=True):
            generation.sample(*output)
            if generation.finish_reason is not None:
                generation.send(None)

    def _generate(self, generation: Generation) -> None:
        """Generate one text to its end by the model's ``generate``."""
        sampling = generation.sampling
        model, last = self._lm.model, list[Tensor]()

        def note(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            last[:] = [output[0, -1].float()]

        def enough(ids: Tensor) -> bool:
            if not generation.abandoned:
                generation.accept(int(ids[0, -1]), self._lm.logit_map(last[0]))
            return generation.finished

        hook = Hook(output_embedding(model), after=note)
        with recording_codes(model) as generation.codes, watch([hook]):
            self._lm.write(
                *(generation.prompt, sampling.max_tokens, sampling.temperature, sampling.seed),
                top_p=sampling.top_p,
                enough=enough,
            )
        # A ``generate`` of the model's own may end without asking.
        generation.finish_reason = generation.finish_reason or "length"
        generation.send(None)


class PreallocatedLayer(DynamicLayer):
    """Keys and values [B, H, T, d] with spare room: ``DynamicLayer`` copies them at every step."""

    keys: Tensor
    values: Tensor

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Replace the cached keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self._buffers = [F.pad(states, (0, 0, 0, SPARE_TOKENS)) for states in (keys, values)]
        self._resize(keys.shape[2])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new tokens; return all."""
        length = self._length + key_states.shape[2]
        if length > self._buffers[0].shape[2]:
            self.fill(*self._resize(self._length))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._length : length] = states
        return self._resize(length)

    def _resize(self, length: int) -> tuple[Tensor, Tensor]:
        self._length = length
        self.keys, self.values = keys, values = [buffer[:, :, :length] for buffer in self._buffers]
        return keys, values


class Batch:
    """The cache of several texts, left-padded to the longest; ``lengths`` are their token counts.

    What is read of a text is its states [T, d], and W z + b and the logits [V] of its last position
    in float32. ``model`` is a decoder for which :func:`supports_batching` is true.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers: list[PreallocatedLayer] = []
        self.lengths: list[int] = []

    def join(self, ids: Tensor) -> Read:
        """Append a text [1, T], and return what is read of it."""
        cache = DynamicCache(config=self._model.config)
        positions = torch.arange(ids.shape[1])[None]
        (read,) = self._forward(ids, torch.ones_like(ids), positions, cache)
        new: list[Any] = cache.layers
        if any(type(layer) is not DynamicLayer for layer in new):
            raise TypeError("the model caches something other than keys and values of all tokens")
        self.lengths.append(ids.shape[1])
        size = max(self.lengths)
        self._layers = self._layers or [PreallocatedLayer() for _ in new]
        for batched, single in zip(self._layers, new, strict=True):
            rows = [batched, single] if batched.is_initialized else [single]
            batched.fill(
                torch.cat([_padded(layer.keys, size) for layer in rows]),
                torch.cat([_padded(layer.values, size) for layer in rows]),
            )
        return read

    def step(self, tokens: list[int]) -> list[Read]:
        """Read the next token of every text."""
        size, lengths = max(self.lengths), torch.tensor(self.lengths)
        mask = torch.arange(size + 1) >= (size - lengths)[:, None]
        cache = Cache(layers=[*self._layers])
        ids = torch.tensor(tokens)[:, None]
        self.lengths = [length + 1 for length in self.lengths]
        return self._forward(ids, mask.long(), lengths[:, None], cache)

    def keep(self, rows: list[int]) -> None:
        """Remove all other rows, and padding that is no longer needed."""
        if len(rows) == len(self.lengths):
            return
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self._layers = []
            return
        last = slice(-max(self.lengths), None)
        for layer in self._layers:
            layer.fill(layer.keys[rows, :, last], layer.values[rows, :, last])

    @torch.no_grad()
    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> list[Read]:
        states: list[Tensor] = []
        embedded: list[Tensor] = []

        def last_only(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            states.append(args[0])
            return (args[0][:, -1:], *args[1:]), kwargs

        def store(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            embedded.append(output)

        # By default some models pass only the last position to their output embedding.
        parameters = signature(self._model.forward).parameters
        options = {"logits_to_keep": 0} if "logits_to_keep" in parameters else {}
        device = self._model.device
        with watch([Hook(output_embedding(self._model), last_only, store)]):
            output = self._model(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                past_key_values=cache,
                use_cache=True,
                **options,
            )
        last = embedded[-1][:, -1].float(), output.logits[:, -1].float()
        return list(zip(states[-1], *last, strict=True))


def _padded(states: Tensor, size: int) -> Tensor:
    return F.pad(states, (0, 0, size - states.shape[2], 0))


def _rope_depends_on_length(module: nn.Module) -> bool:
    rope_type: Any = getattr(module, "rope_type", None)
    # Models with several kinds of layers have one for each.
    kinds: list[Any] = list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]
    return any("dynamic" in str(kind) or kind == "longrope" for kind in kinds)


def supports_batching(model: PreTrainedModel) -> bool:
    """Return whether texts in a batch get the predictions that each gets alone.

    A model must accept position ids and cache nothing but keys and values of all positions. Sliding
    windows, recurrent states and uncertainty codes belong to one text, and so do rotary embeddings
    that depend on the longest text. Beyond that, two random texts are tried: the second joins
    the first, and stays when it leaves.
    """
    if (
        uncertainty_of(model) is not None
        or "position_ids" not in signature(model.forward).parameters
        or any(_rope_depends_on_length(module) for module in model.modules())
    ):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = output_embedding(model).weight
    assert isinstance(rows, Tensor)
    first, second = (torch.randint(len(rows), (1, n), generator=generator) for n in (9, 6))
    batch = Batch(model)
    try:
        batch.join(first[:, :-3])
        batch.step([int(first[0, -3])])
        batch.join(second[:, :-2])
        together = batch.step([int(first[0, -2]), int(second[0, -2])])
        batch.keep([1])
        together += batch.step([int(second[0, -1])])
        with torch.no_grad():
            alone = [
                model(input_ids=ids.to(model.device)).logits[0].float() for ids in (first, second)
            ]
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError):
        return False
    actual = torch.stack([logits for *_, logits in together])
    expected = torch.stack([alone[0][-2], alone[1][-2], alone[1][-1]])
    error = (actual - expected).abs() / expected.abs().clamp_min(1)
    return bool((error <= tolerance_of(rows.dtype)).all())
