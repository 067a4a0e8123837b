"""Hooks that hold for one block, and for the thread or task that opened it."""

import asyncio
import contextvars
import threading

import pytest
import torch
from torch import nn

from prismlm.models.watch import Hook, evaluating, unwatched, watch


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


X = torch.ones(1, 3)


def noting(into, name):
    return lambda module, args, kwargs, *output: into.append((name, len(output)))


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def hooks_of(model):
    return [h for m in model for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_hooks_act_in_order_and_change_what_passes(model):
    seen = []
    double = Hook(model[0], before=lambda m, args, kwargs: ((2 * args[0],), kwargs))
    zero = Hook(model[2], after=lambda m, args, kwargs, output: output * 0)
    with watch([Hook(model[0], noting(seen, "a"), noting(seen, "b")), double]):
        assert torch.equal(model[0](X), nn.functional.linear(2 * X, model[0].weight, model[0].bias))
        with watch([zero]):
            assert not model(X).any()
    assert seen == [("a", 0), ("b", 1)] * 2
    assert not hooks_of(model)


def test_passes_of_other_threads_are_not_seen_nor_changed(model):
    alone, seen, other = model(X), [], []
    zero = Hook(model[2], after=lambda m, args, kwargs, output: output * 0)
    with watch([Hook(model[0], noting(seen, "own")), zero]):
        in_thread(lambda: other.append(model(X)))
        assert not seen
        # A thread that is given a copy of the context is in the block.
        copied = contextvars.copy_context()
        in_thread(lambda: other.append(copied.run(model, X)))
    assert torch.equal(other[0], alone)
    assert not other[1].any()
    assert seen == [("own", 0)]


def test_tasks_of_one_thread_see_their_own(model):
    async def look(name, seen):
        with watch([Hook(model[0], noting(seen, name))]):
            await asyncio.sleep(0)
            model(X)
            await asyncio.sleep(0)
        return seen

    async def both():
        return await asyncio.gather(look("a", []), look("b", []))

    assert asyncio.run(both()) == [[("a", 0)], [("b", 0)]]


def test_unwatched_passes_are_seen_only_by_what_asks_for_them(model):
    seen = []
    first, second = (Hook(model[0], noting(seen, name)) for name in "ab")
    with watch([first]), watch([second], unwatched_too=True):
        with unwatched(), unwatched():
            model(X)
        assert seen == [("b", 0)]
        model(X)
    assert seen == [("b", 0), ("a", 0), ("b", 0)]


def test_hooks_are_gone_whatever_happens(model):
    with pytest.raises(RuntimeError, match="own"), watch([Hook(model[0], noting([], "a"))]):
        raise RuntimeError("own")
    # Of two hooks the second cannot be put up.
    with pytest.raises(AttributeError), watch([Hook(model[0], noting([], "a")), Hook(None, print)]):
        pass
    assert not hooks_of(model)


def test_of_equal_hooks_in_nested_blocks_the_outermost_acts(model):
    def double(module, args, kwargs):
        return (2 * args[0],), kwargs

    once = nn.functional.linear(2 * X, model[0].weight, model[0].bias)
    outer, inner = watch([Hook(model[0], double)]), watch([Hook(model[0], double)])
    outer.__enter__()
    with inner:
        assert torch.equal(model[0](X), once)
        # A copy of the context, in which the outer block ends first.
        copied = contextvars.copy_context()
        outer.__exit__(None, None, None)
        assert torch.equal(copied.run(model[0], X), once)
    assert not hooks_of(model)


def test_what_is_always_called_is_when_the_module_raises(model):
    seen = []
    always = Hook(model[2], after=noting(seen, "always"), always=True)
    with watch([always, Hook(model[2], after=noting(seen, "else"))]), pytest.raises(RuntimeError):
        model[2](torch.ones(1, 7))
    assert seen == [("always", 1)]


def test_modes_gradients_and_attention_are_as_before():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.Dropout())
    model[1].eval()
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            assert not model(torch.ones(1, 2)).requires_grad
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert [module.training for module in model.modules()] == [True, True, False, True]
        assert model(torch.ones(1, 2)).requires_grad
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
