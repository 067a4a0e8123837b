"""A real server on loopback with the tiny model, and OpenAI's own client."""

import openai
import pytest

import prismlm
from prismlm.web import create_app
from tests.helpers.chats import chatting
from tests.helpers.running import Running


class Served(Running):
    """A running server, its model and a client of it."""

    def __init__(self, lm, **options):
        super().__init__(lambda host: create_app(lm, name="tiny", **options))
        self.lm, self.engine = lm, self.app.state.server.engine
        base = f"http://{self.host}/v1"
        self.client = openai.OpenAI(base_url=base, api_key="none", max_retries=0)

    def __exit__(self, *_):
        self.client.close()
        super().__exit__()

    def chat(self, messages, **options):
        return self.client.chat.completions.create(model="tiny", messages=messages, **options)

    def complete(self, prompt, **options):
        return self.client.completions.create(model="tiny", prompt=prompt, **options)

    def attribute(self, **body):
        return self.client.post("/attributions", body={"model": "tiny"} | body, cast_to=object)


@pytest.fixture(scope="session")
def chat_model(tiny_model, tmp_path_factory):
    """The tiny model with a chat template."""
    return chatting(tiny_model, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def served(chat_model):
    with Served(prismlm.load(chat_model)) as server:
        yield server


@pytest.fixture(scope="module")
def lm(served):
    return served.lm
