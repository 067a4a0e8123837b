"""Texts written together get what each gets alone."""

import asyncio
import random
import time

import pytest
import torch

from prismlm.models.seam import capture
from prismlm.web.engine import Batch, Busy, Engine, RequestQueue, supports_batching
from prismlm.web.generation import Generation, Sampling
from tests.helpers.families import build
from tests.helpers.feedback_models import make_fed_gpt2, make_fed_protot

TOGETHER = {"gpt2", "llama", "llama-tied", "qwen3", "granite", "cohere", "phi"}


@pytest.mark.parametrize("name", [*sorted(TOGETHER), "mistral", "gemma2", "mamba"])
def test_families_that_write_together_are_told_from_others(name):
    assert supports_batching(build(name)) == (name in TOGETHER)


def test_codes_of_uncertainty_and_dynamic_rotations_are_of_one_text():
    for make in (make_fed_gpt2, make_fed_protot):
        assert not supports_batching(make()[0])
    model = build("llama")
    assert any(getattr(module, "rope_type", None) == "default" for module in model.modules())
    for rope_type in ("dynamic", "longrope"):
        model.model.rotary_emb.rope_type = rope_type
        assert not supports_batching(model)


def test_texts_are_written_while_the_event_loop_is_busy_and_in_one_after_another(lm):
    async def write():
        texts = [Generation(lm, "The", lm.encode("The"), Sampling(count)) for count in (9, 4)]
        for text in texts:
            engine.submit(text)
        await asyncio.sleep(0)  # until the thread has begun
        deadline = time.monotonic() + 30
        while not texts[1].finished and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [len(text.ids) for text in texts] == [4, 4]
        while await texts[0].chunks.get() is not None:
            pass
        assert len(texts[0].ids) == 9

    engine = Engine(lm, 2, 0)
    asyncio.run(write())
    asyncio.run(engine.close())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_that_join_and_leave_get_the_states_they_get_alone(name):
    """Against a forward pass over each whole text, without cache or padding."""
    model, draw = build(name), random.Random(0)
    texts = [[draw.randrange(1, 320) for _ in range(draw.randrange(8, 40))] for _ in range(9)]
    begun = [draw.randrange(1, len(text)) for text in texts]
    batch, rows, outputs = Batch(model), [], {number: [] for number in range(len(texts))}
    waiting, most = list(range(len(texts))), 0
    while waiting or rows:
        ended = [row for row in rows if begun[row] == len(texts[row])]
        keep = [place for place, row in enumerate(rows) if row not in ended]
        batch.keep(keep)
        rows = [rows[place] for place in keep]
        if rows:
            states, _, logits = batch.step([texts[row][begun[row]] for row in rows])
            for row, state, after in zip(rows, states, logits, strict=True):
                begun[row] += 1
                outputs[row].append((state[None], after))
        if waiting and draw.random() < 0.4:
            row = waiting.pop()
            z, _, after = batch.join(torch.tensor([texts[row][: begun[row]]]))
            outputs[row].append((z, after))
            rows.append(row)
        most = max(most, len(rows))
    assert most > 3
    # Nothing is kept of texts that have left.
    assert not batch._layers
    for text, seen in zip(texts, outputs.values(), strict=True):
        with torch.no_grad(), capture(model) as alone:
            logits = model(torch.tensor([text])).logits[0]
        states = torch.cat([state for state, _ in seen])
        torch.testing.assert_close(states, alone.z[0], rtol=1e-4, atol=1e-4)
        after = torch.stack([row for _, row in seen])
        torch.testing.assert_close(after, logits[-len(seen) :], rtol=1e-4, atol=1e-4)


def test_of_calls_at_the_same_moment_so_many_wait_and_others_are_refused():
    done = []

    async def ask(number):
        await queue.run(lambda: done.append(number))

    async def all_at_once():
        return await asyncio.gather(*map(ask, range(9)), return_exceptions=True)

    queue = RequestQueue(2)
    errors = asyncio.run(all_at_once())
    assert done == [0, 1, 2]
    assert [type(error) for error in errors[3:]] == [Busy] * 6
    assert queue.waiting == 0
