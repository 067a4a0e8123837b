"""A real server on loopback with the tiny model, and OpenAI's own client."""

import contextlib
import http.client
import json
import socket
import threading

import openai
import pytest
import uvicorn

import prismlm
from prismlm.web import create_app
from tests.helpers.chats import chatting


class Served:
    """A running server, its model and a client of it."""

    def __init__(self, lm, **options):
        self.lm = lm
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.app = create_app(lm, name="tiny", **options)
        self.engine = self.app.state.server.engine
        config = uvicorn.Config(self.app, log_level="critical", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.key = options.get("api_key") or "none"
        self.client = openai.OpenAI(**self.address)

    @property
    def address(self):
        return {"base_url": f"http://{self.host}/v1", "api_key": self.key, "max_retries": 0}

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.should_exit = True
        self.thread.join()

    def chat(self, messages, **options):
        return self.client.chat.completions.create(model="tiny", messages=messages, **options)

    def complete(self, prompt, **options):
        return self.client.completions.create(model="tiny", prompt=prompt, **options)

    def ask(self, method, path, body=None, **headers):
        """Return status and text of a plain request."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {} if data is None else {"Content-Type": "application/json"}
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, data, sent | headers)
            response = connection.getresponse()
            return response.status, response.read().decode()


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
