"""Hooks for the duration of a block, in the thread or task that opened it."""

import asyncio
import contextvars
import threading

import pytest
import torch
from torch import nn

from prismlm.models.watch import Hook, evaluating, unwatched, watch

X = torch.ones(1, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


def record(calls, name):
    return lambda module, args, kwargs, *output: calls.append((name, len(output)))


def double_input(module, args, kwargs):
    return (2 * args[0],), kwargs


def zero_output(module, args, kwargs, output):
    return output * 0


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def hooks_of(model):
    return [h for m in model for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_hooks_act_in_order_and_replace_inputs_and_outputs(model):
    calls = []
    with watch(
        [Hook(model[0], record(calls, "a"), record(calls, "b")), Hook(model[0], double_input)]
    ):
        assert torch.equal(model[0](X), nn.functional.linear(2 * X, model[0].weight, model[0].bias))
        with watch([Hook(model[2], after=zero_output)]):
            assert not model(X).any()
    assert calls == [("a", 0), ("b", 1)] * 2
    assert not hooks_of(model)
    with pytest.raises(RuntimeError, match="stop"), watch([Hook(model[0], double_input)]):
        raise RuntimeError("stop")
    assert not hooks_of(model)


def test_other_threads_are_neither_seen_nor_changed(model):
    plain, calls, outputs = model(X), [], []
    with watch([Hook(model[0], record(calls, "a")), Hook(model[2], after=zero_output)]):
        in_thread(lambda: outputs.append(model(X)))
        assert not calls
        # A thread with a copy of the context is in the block.
        copied = contextvars.copy_context()
        in_thread(lambda: outputs.append(copied.run(model, X)))
    assert torch.equal(outputs[0], plain)
    assert not outputs[1].any()
    assert calls == [("a", 0)]


def test_tasks_of_one_thread_see_only_their_passes(model):
    async def run(name, calls):
        with watch([Hook(model[0], record(calls, name))]):
            await asyncio.sleep(0)
            model(X)
            await asyncio.sleep(0)
        return calls

    async def both():
        return await asyncio.gather(run("a", []), run("b", []))

    assert asyncio.run(both()) == [[("a", 0)], [("b", 0)]]


def test_unwatched_passes(model):
    calls = []
    first, second = (Hook(model[0], record(calls, name)) for name in "ab")
    with watch([first]), watch([second], unwatched_too=True):
        with unwatched(), unwatched():
            model(X)
        assert calls == [("b", 0)]
        model(X)
    assert calls == [("b", 0), ("a", 0), ("b", 0)]


def test_of_equal_hooks_in_nested_blocks_the_outermost_acts(model):
    doubled = nn.functional.linear(2 * X, model[0].weight, model[0].bias)
    outer, inner = (watch([Hook(model[0], double_input)]) for _ in range(2))
    outer.__enter__()
    with inner:
        assert torch.equal(model[0](X), doubled)
        # In a copy of the context the outer block ends first.
        copied = contextvars.copy_context()
        outer.__exit__(None, None, None)
        assert torch.equal(copied.run(model[0], X), doubled)
    assert not hooks_of(model)


def test_evaluating_restores_modes_and_gradients():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Dropout())
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not model(torch.ones(1, 2)).requires_grad
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert model(torch.ones(1, 2)).requires_grad
