"""A real server with the tiny model, and a real browser that looks at it."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest
import uvicorn

import prismlm
from prismlm.explorer import create_app
from prismlm.explorer.session import Limits
from tests.helpers.named_lens import named_model

TOKEN = "the-key-of-this-run"
HOSTILE = '<img src=x onerror="document.title=1"> \u202egnp'
PROMPTS = {"medicine": "The symptoms of this disease in patients include"}
QUESTIONS = {"medicine": "What does this disease do?"}


class Served:
    """A running server and its address."""

    def __init__(self, lm, **limits):
        self.lm, self.name = lm, lm.path.resolve().name
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self.address = f"http://{self.host}/?token={TOKEN}"
        hosts = frozenset({self.host})
        self.app = create_app(
            lm,
            token=TOKEN,
            hosts=hosts,
            prompts=PROMPTS,
            questions=QUESTIONS,
            limits=Limits(**limits),
        )
        config = uvicorn.Config(self.app, log_level="error", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()

    def ask(self, method, path, body=None, headers=None, key=TOKEN):
        """Return status, headers and body of a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {} if key is None else {"Authorization": f"Bearer {key}"}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        with contextlib.closing(connection):
            connection.request(method, path, data, sent | (headers or {}))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def refused(self, method, path, body=None, expected=400):
        """Return what is said of a request that must be refused."""
        status, _, data = self.ask(method, path, body)
        assert status == expected, data
        return json.loads(data)["error"]

    def json(self, method, path, body=None):
        """Return the JSON of a request that must succeed."""
        status, _, data = self.ask(method, path, body)
        assert status == 200, data
        return json.loads(data)

    def write(self, asked, tokens, **more):
        """Return the response to a text, or to a question where it is a list of messages."""
        chat = not isinstance(asked, str)
        path = "/api/v1/chat/completions" if chat else "/api/v1/completions"
        put = {"messages": list(asked)} if chat else {"prompt": asked}
        return self.json("POST", path, put | {"model": self.name, "max_tokens": tokens} | more)

    def answer(self, asked, tokens, **more):
        """Return what the page shows of the answer to a text or to messages."""
        return self.json("GET", f"/api/answers/{self.write(asked, tokens, **more)['id']}")

    def events(self, path, body=None):
        """Return what a streaming request tells, as pairs of name and data."""
        status, _, data = self.ask("GET" if body is None else "POST", path, body)
        assert status == 200, data
        blocks = data.decode().strip().split("\n\n")
        pairs = (block.split("\n", 1) for block in blocks)
        return [(n.removeprefix("event: "), json.loads(d.removeprefix("data: "))) for n, d in pairs]


def texts_of(rows):
    """Return rows of texts or chats as the file that an audit is asked of."""
    content = "\n".join(json.dumps(row) for row in rows)
    return {"files": [{"name": "texts.jsonl", "content": content}]}


class Stream:
    """A request that is read event by event, from a connection of its own."""

    def __init__(self, served, body, path):
        self.connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        self.connection.request("POST", path, json.dumps(body), headers)
        self.response = self.connection.getresponse()

    def next(self):
        """Return the name and the data of the next event; None at the end."""
        name = self.response.readline().decode().strip()
        data = self.response.readline().decode().strip()
        self.response.readline()
        if not name:
            return None
        return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def chunk(self):
        """Return the next chunk of an answer as OpenAI streams it."""
        data = self.response.readline().decode().strip().removeprefix("data: ")
        self.response.readline()
        return None if data in ("", "[DONE]") else json.loads(data)

    def until(self, wanted):
        """Return the data of the next event of a name."""
        while (event := self.next()) is not None:
            if event[0] == wanted:
                return event[1]
        raise AssertionError(f"no event {wanted}")


@contextlib.contextmanager
def unhurried(lm):
    """Let a model take its time, as larger ones do, and never end its text by itself.

    So small a one is done before a browser on a busy machine can do anything about it.
    """
    own = lm.model.generation_config.eos_token_id
    hook = lm.model.base_model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    lm.model.generation_config.eos_token_id = None
    try:
        yield
    finally:
        hook.remove()
        lm.model.generation_config.eos_token_id = own


@pytest.fixture
def taking_its_time(served):
    """The served model is :func:`unhurried` during the test."""
    with unhurried(served.lm):
        yield


@pytest.fixture(scope="session")
def served(tiny_model):
    with Served(prismlm.load(tiny_model)) as server:
        yield server


@pytest.fixture(scope="module")
def lm(served):
    return served.lm


@pytest.fixture(scope="session")
def named(tiny_model, tmp_path_factory):
    """A server of a model whose prototypes have names, categories and a map; it reads 60 tokens."""
    directory = tmp_path_factory.mktemp("named") / "model"
    with Served(named_model(tiny_model, directory, first=HOSTILE), tokens=60) as server:
        yield server


# Not of the session: two of them in one process, this and that of tests/pages, do not go together.
@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(
            executable_path="/usr/bin/chromium",
            args=["--no-sandbox", "--enable-unsafe-swiftshader"],
        )
        yield found
        found.close()


def unfold(page):
    """Unfold the tokens of the answer that has come."""
    page.wait_for_selector(".x-exports")
    if not page.locator(".p-tokens[open]").count():
        page.click(".p-tokens > summary")


@contextlib.contextmanager
def visited(browser, served, script="", **options):
    """A page of the explorer, opened with its key; an error in its scripts fails the test."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    opened = context.new_page()
    if script:
        opened.add_init_script(script)
    errors = []
    opened.on("pageerror", lambda error: errors.append(error))
    opened.goto(served.address)
    opened.wait_for_selector(".x-nav a")
    yield opened
    context.close()
    assert errors == []


@pytest.fixture
def page(browser, served):
    with visited(browser, served) as opened:
        yield opened
