"""Hooks on forward passes for the duration of a block, and evaluation mode.

Many threads may use one model. A block sees and changes only the passes of the thread or asyncio
task that opened it; a thread started inside a block is outside it, unless it runs in a copy of its
context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
T = TypeVar("T")

# Torch numbers its hooks by a counter that is not thread-safe.
_registering = threading.Lock()


class Hook(NamedTuple):
    """Functions to call with a module.

    Attributes:
        module: the module.
        before: called with (module, args, kwargs); may return a replacement (args, kwargs).
        after: called with (module, args, kwargs, output); may return a replacement output.
    """

    module: nn.Module
    before: Before | None = None
    after: After | None = None


# The hooks of each block that this thread or task is in; an ended block has none.
_blocks: ContextVar[tuple[list[Hook], ...]] = ContextVar("prismlm_watching", default=())
_unwatched: ContextVar[bool] = ContextVar("prismlm_unwatched", default=False)


@contextmanager
def watch(hooks: Iterable[Hook], *, unwatched_too: bool = False) -> Iterator[None]:
    """Call hooks in this thread's or task's passes during the block.

    They act in the order of the blocks and of ``hooks``, and are always removed after the block. Of
    equal hooks in nested blocks only the outermost acts. A model that was compiled before calls no
    hooks. With ``unwatched_too`` they act in :func:`unwatched` passes as well, as hooks that change
    a model must.
    """
    block, handles = list(hooks), list[RemovableHandle]()

    def wrapped(hook: Hook, function: Before | After) -> Callable[..., Any]:
        # A hook that another thread removes during a call is still called, without keywords, but
        # does not act there.
        def called(*args: Any) -> Any:
            acting = next((other for other in _blocks.get() if hook in other), None)
            if acting is block and (unwatched_too or not _unwatched.get()):
                return function(*args)
            return None

        return called

    _blocks.set((*_blocks.get(), block))
    try:
        with _registering:
            for hook in tuple(block):
                module, before, after = hook
                if before is not None:
                    function = wrapped(hook, before)
                    handles.append(module.register_forward_pre_hook(function, with_kwargs=True))
                if after is not None:
                    function = wrapped(hook, after)
                    handles.append(module.register_forward_hook(function, with_kwargs=True))
        yield
    finally:
        # Not reset(): a generator may be closed in another context than it was started in.
        _blocks.set(tuple(other for other in _blocks.get() if other is not block))
        block.clear()
        with _registering:
            for handle in handles:
                handle.remove()


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value in the block, for this thread or task."""
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)


def unwatched() -> AbstractContextManager[None]:
    """Hide this thread's passes in the block from outer :func:`watch` blocks."""
    return within(_unwatched, True)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the block without dropout and gradients, then restore the mode of every module.

    cuDNN's attention is disabled: planning for each length takes longer than it saves.
    """
    modes = [(module, module.training) for module in model.modules()]
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    model.eval()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for module, mode in modes:
            module.training = mode
