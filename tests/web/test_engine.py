"""The chunks sent of a text, and texts written together, which get what each gets alone."""

import asyncio
import random
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from prismlm.models.seam import capture
from prismlm.web.engine import Batch, Busy, Engine, RequestQueue, supports_batching
from prismlm.web.generation import Generation, Sampling
from tests.helpers.families import build
from tests.helpers.small_models import make_fed_gpt2, make_fed_protot

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


def test_texts_are_written_between_long_prompts(lm):
    async def write():
        ids = [lm.encode("The"), *[torch.full((1, 300), 50)] * 2]
        texts = [Generation(lm, "", prompt, Sampling(4)) for prompt in ids]
        for text in texts:
            engine.submit(text)
        for text in texts:
            while await text.chunks.get() is not None:
                pass

    lengths, engine = [], Engine(lm, 4, 0)
    hook = lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    asyncio.run(write())
    hook.remove()
    asyncio.run(engine.close())
    assert lengths[1:5] == [300, 1, 300, 1]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_texts_that_join_and_leave_get_the_states_they_get_alone(name):
    """Against a forward pass over each whole text, without cache or padding."""
    model, draw = build(name), random.Random(0)
    texts = [[draw.randrange(1, 320) for _ in range(draw.randrange(8, 40))] for _ in range(9)]
    begun = [draw.randrange(1, len(text)) for text in texts]
    batch, rows, outputs = Batch(model), [], [[] for _ in texts]
    waiting, most = list(range(len(texts))), 0
    while waiting or rows:
        keep = [place for place, row in enumerate(rows) if begun[row] < len(texts[row])]
        batch.keep(keep)
        rows = [rows[place] for place in keep]
        read = batch.step([texts[row][begun[row]] for row in rows]) if rows else []
        for row in rows:
            begun[row] += 1
        if waiting and draw.random() < 0.4:
            rows.append(waiting.pop())
            read.append(batch.join(torch.tensor([texts[rows[-1]][: begun[rows[-1]]]])))
        for row, output in zip(rows, read, strict=True):
            outputs[row].append(output)
        most = max(most, len(rows))
    assert most > 3
    # Nothing is kept of texts that have left.
    assert not batch._layers
    for text, seen in zip(texts, outputs, strict=True):
        with torch.no_grad(), capture(model) as alone:
            logits = model(torch.tensor([text])).logits[0]
        states, _, after = zip(*seen, strict=True)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(torch.cat(states), alone.z[0], **close)
        torch.testing.assert_close(torch.stack(after), logits[-len(seen) :], **close)


def test_of_calls_at_the_same_moment_so_many_wait_and_others_are_refused():
    done, queue = [], RequestQueue(2)

    async def all_at_once():
        calls = (queue.run(partial(done.append, number)) for number in range(9))
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = asyncio.run(all_at_once())
    assert done == [0, 1, 2]
    assert [type(error) for error in errors[3:]] == [Busy] * 6
    assert queue.waiting == 0


# -- the chunks of one text, whose tokens are single bytes of UTF-8

END = 256
LM = SimpleNamespace(
    model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=END)),
    words=lambda ids: bytes(one for one in ids if one < END).decode(errors="replace"),
)


def written(data, stop=(), tokens=100):
    """Return a generation of these bytes, and the chunks sent of it."""

    async def write():
        wanted = Sampling(tokens, stop=stop, alternatives=0)
        writing = Generation(LM, "", torch.tensor([[1]]), wanted)
        for token in [*data.encode(), END]:
            if not writing.finished:
                writing.accept(token, torch.zeros(END + 1))
        await asyncio.sleep(0)
        return writing, [writing.chunks.get_nowait() for _ in range(writing.chunks.qsize())]

    return asyncio.run(write())


@pytest.mark.parametrize(
    ("data", "stop", "tokens", "text"),
    [
        ("ab 東京 é.", (), 6, "ab 東"),
        ("ab 東京 é.", (), 5, "ab \ufffd"),
        ("ab ENDÖ cd", ("ENDÖ",), 100, "ab "),
        ("ab ENDE cd", ("ENDÖ", "x"), 100, "ab ENDE cd"),
        ("東京 cd", ("京",), 100, "東"),
        ("ab EN", ("END",), 100, "ab EN"),
    ],
)
def test_pieces_join_to_the_text_with_every_token_of_it(data, stop, tokens, text):
    writing, chunks = written(data, stop, tokens)
    assert writing.text == text
    assert "".join(one.text for one in chunks) == text
    assert all("\ufffd" not in one.text for one in chunks[:-1])
    own = [one for one in writing.ids if one != END]
    assert LM.words(own) == text
    choices = [choice for one in chunks for choice in one.tokens]
    assert [choice.token for choice in choices] == own
    # Each lies at the character that it begins or is a byte of.
    assert [choice.offset for choice in choices] == [
        len(bytes(own[:n]).decode(errors="ignore")) for n in range(len(own))
    ]
