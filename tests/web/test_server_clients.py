"""Other programs' clients, and many at once."""

import asyncio
import time

import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.helpers.chats import QUESTION
from tests.web.conftest import Served

TEXT = "The patient was given a dose of the drug"


def test_langchain_invokes_and_streams(served, lm):
    answer = lm.explain([{"role": "user", "content": QUESTION}], generate=12).answer
    chat = ChatOpenAI(
        model="tiny", base_url=served.address["base_url"], api_key="none", max_tokens=12
    )
    assert chat.invoke(QUESTION).content == answer
    assert "".join(part.text for part in chat.stream(QUESTION)) == answer


@pytest.mark.parametrize(
    ("clients", "seconds"), [(24, 0), pytest.param(200, 60, marks=pytest.mark.slow)]
)
def test_many_clients_lose_nothing(lm, clients, seconds):
    """Each asks again until the time is over, at least once."""
    texts = [f"{TEXT} on day {number} of the {number % 7} weeks" for number in range(clients)]
    expected = [lm.generate(text, tokens=6 + number % 5) for number, text in enumerate(texts)]
    ends = time.monotonic() + seconds

    async def ask(client, number):
        answers = []
        while not answers or time.monotonic() < ends:
            answer = await client.completions.create(
                model="tiny",
                prompt=texts[number],
                max_tokens=6 + number % 5,
                stream=number % 2 == 1,
            )
            if number % 2 == 0:
                answers.append((answer.choices[0].text, answer.prismlm))
            else:
                parts = [one async for one in answer]
                answers.append(("".join(one.choices[0].text for one in parts), parts[-1].prismlm))
        return answers

    async def all_of_them(address):
        async with openai.AsyncOpenAI(**address, timeout=600) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(clients)))

    with Served(lm, batch_size=6, max_waiting=clients) as server:
        answers = asyncio.run(all_of_them(server.address))
        assert (server.engine.waiting, server.engine.running) == (0, 0)
    for text, whole, of_client in zip(texts, expected, answers, strict=True):
        for written, value in of_client:
            assert text + written == whole
            assert value["support"]["level"] in ("strong", "weak", "none")
