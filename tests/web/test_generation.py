"""The chunks that are sent while a text is generated: tokens here are single bytes of UTF-8."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from prismlm.web.generation import Generation, Sampling

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
    assert [choice.token for one in chunks for choice in one.tokens] == own
