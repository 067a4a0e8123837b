"""The one way to look into a forward pass, or to change one: hooks that hold for one block.

Many threads may use one model. What a block sees and changes are the passes of the thread or
asyncio task that opened it, and no others; a thread started inside a block is not in it, unless it
was given a copy of its context.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]

# Torch numbers its hooks by a counter that two threads may read at once.
_registering = threading.Lock()


class Hook(NamedTuple):
    """What is done when a module is called.

    Attributes:
        module: the module.
        before: called with (module, args, kwargs); a pair (args, kwargs) takes their place.
        after: called with (module, args, kwargs, output); what is not None takes its place.
        always: call ``after`` too where the module raised, without an output.
    """

    module: nn.Module
    before: Before | None = None
    after: After | None = None
    always: bool = False


@dataclass(eq=False)
class _Block:
    """One ``with`` block of a thread or task."""

    hooks: tuple[Hook, ...]
    is_open: bool = True

    def acts(self, hook: Hook) -> bool:
        """Say whether a hook is to act now: in this block, and not in one around it already."""
        blocks = _blocks.get()
        around = itertools.takewhile(lambda block: block is not self, blocks)
        here = self.is_open and self in blocks
        return here and not any(b.is_open and hook in b.hooks for b in around)


_blocks: ContextVar[tuple[_Block, ...]] = ContextVar("prismlm_watching", default=())
_unwatched: ContextVar[bool] = ContextVar("prismlm_unwatched", default=False)


@contextmanager
def watch(hooks: Iterable[Hook], *, unwatched_too: bool = False) -> Iterator[None]:
    """Let hooks act on this thread's or task's passes during the block.

    They act in the order of the blocks and of ``hooks``, and are gone after the block whatever
    happens in it. Of equal hooks in nested blocks only the outermost acts: a function that reads
    what holds from a context variable does so once a pass. A model that was compiled before calls
    no hooks.

    Args:
        hooks: what is done where.
        unwatched_too: act in passes of :func:`unwatched` as well, as what changes a model must.
    """
    block, handles = _Block(tuple(hooks)), list[RemovableHandle]()

    def acting(hook: Hook, act: Before | After) -> Callable[..., Any]:
        # A hook that another thread removes during a call is still called, without keywords: it
        # does not act there, so that they are not looked at.
        def called(*given: Any) -> Any:
            if block.acts(hook) and (unwatched_too or not _unwatched.get()):
                return act(*given)
            return None

        return called

    _blocks.set((*_blocks.get(), block))
    try:
        with _registering:
            for hook in block.hooks:
                module, before, after, always = hook
                if before is not None:
                    act = acting(hook, before)
                    handles.append(module.register_forward_pre_hook(act, with_kwargs=True))
                if after is not None:
                    act, more = acting(hook, after), {"with_kwargs": True, "always_call": always}
                    handles.append(module.register_forward_hook(act, **more))
        yield
    finally:
        block.is_open = False
        # Not reset(): a generator may be closed in another context than it was begun in.
        _blocks.set(tuple(held for held in _blocks.get() if held is not block))
        with _registering:
            for handle in handles:
                handle.remove()


@contextmanager
def unwatched() -> Iterator[None]:
    """Keep this thread's passes during the block from every :func:`watch` around it.

    For passes that only prepare the one that is meant to be seen.
    """
    before = _unwatched.get()
    _unwatched.set(True)
    try:
        yield
    finally:
        _unwatched.set(before)
